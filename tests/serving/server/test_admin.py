"""Operators' routes against a running engine: look, abort, pause, reset. Each with requests of others beside it."""

import asyncio
import json

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import eventually_async
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

LONG = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 6000, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two rows, so that a third request waits."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3", max_position_embeddings=8192)
    engine = EngineConfig(model=str(checkpoint), num_pages=800, max_num_seqs=2)
    with start_server(engine, ENGINE_MODULE, api_key=()) as running:
        yield running


@pytest.fixture(autouse=True)
def clean(server):
    yield
    server.post("/abort_requests", {"abort_all": True})
    server.post("/resume")
    server.wait_until_unused()


def together(server, scenario):
    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            return await scenario(client)

    return asyncio.run(run())


def start(client, **fields):
    return asyncio.ensure_future(client.post("/v1/completions", json=LONG | fields))


async def state_of(client, label, condition):
    async def told():
        reply = await client.get(f"/v1/requests/cmpl-{label}")
        return reply.json() if reply.status_code == 200 and condition(reply.json()["requests"]) else None

    return await eventually_async(told)


def test_a_request_shows_its_state_and_why_it_waits(server):
    async def scenario(client):
        running = [start(client, request_id=f"r{i}") for i in range(2)]
        for i in range(2):
            report = await state_of(client, f"r{i}", lambda states: states[0]["status"] == "running")
            assert report["id"] == f"cmpl-r{i}"
            state = report["requests"][0]
            assert state["num_prompt_tokens"] > 0
            assert state["wait_reason"] == ""
        waiting = start(client, request_id="w", n=2)
        reason = "needs a row, all 2 are in use"  # once the scheduler has looked at it
        report = await state_of(client, "w", lambda states: states[0]["wait_reason"] == reason)
        assert [state["status"] for state in report["requests"]] == ["waiting", "waiting"]
        await eventually_async(lambda: server.metric("num_requests_waiting_by_reason", reason="capacity") == 2)
        by_reason = {one: server.metric("num_requests_waiting_by_reason", reason=one) for one in
                     ("capacity", "same_prompt", "grammar")}  # fmt: skip
        assert by_reason == {"capacity": 2, "same_prompt": 0, "grammar": 0}
        await client.post("/abort_requests", json={"abort_all": True})
        for task in [*running, waiting]:
            assert {choice["finish_reason"] for choice in (await task).json()["choices"]} == {"abort"}

    together(server, scenario)
    assert server.http.get(f"{server.url}/v1/requests/cmpl-r0").status_code == 404


def test_only_the_whole_id_aborts(server):
    async def scenario(client):
        tasks = [start(client, request_id="a-1"), start(client, request_id="a-12")]
        for label in ("a-1", "a-12"):
            await state_of(client, label, lambda states: states[0]["status"] == "running")
        names = ["cmpl-a", "cmpl-a-", "a-1", "CMPL-A-1", "cmpl-a-1 ", "", "cmpl-"]
        reply = await client.post("/abort_requests", json={"request_ids": names})
        assert reply.json() == {"num_aborted": 0, "unknown": names}
        reply = await client.post("/abort_requests", json={"request_ids": ["cmpl-a-1", "cmpl-a-1"]})
        assert reply.json() == {"num_aborted": 1, "unknown": []}
        assert (await tasks[0]).json()["choices"][0]["finish_reason"] == "abort"
        assert not tasks[1].done()

    together(server, scenario)


def test_one_id_for_two_calls_neither_mixes_nor_aborts_them(server):
    async def scenario(client):
        mine = client.post("/v1/completions", json=SHORT | {"request_id": "same"})
        other = client.post("/v1/completions", json=SHORT | {"request_id": "same", "prompt": "hello there you"})
        expected = [(await client.post("/v1/completions", json=SHORT | {"prompt": prompt})).json()["choices"]
                    for prompt in ("the quick brown fox", "hello there you")]  # fmt: skip
        assert [reply.json()["choices"] for reply in await asyncio.gather(mine, other)] == expected

        tasks = [start(client, request_id="same"), start(client, request_id="same")]
        await eventually_async(lambda: server.metric("num_requests_running") == 2)
        for reply in (
            await client.post("/abort_requests", json={"request_ids": ["cmpl-same"]}),
            await client.get("/v1/requests/cmpl-same"),
        ):
            assert reply.status_code == 409
            assert reply.json()["error"]["code"] == "conflict"
        assert not any(task.done() for task in tasks)

    together(server, scenario)


def test_a_stream_learns_that_it_was_aborted(server):
    async def scenario(client):
        events = []
        async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "request_id": "s"}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])
                if len(events) == 3:
                    await client.post("/abort_requests", json={"request_ids": ["cmpl-s"]})
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"

    together(server, scenario)


def test_paused_requests_go_on_with_the_same_tokens(server):
    async def scenario(client):
        body = LONG | {"max_tokens": 3000, "request_id": "p"}
        expected = (await client.post("/v1/completions", json=body)).json()["choices"]
        task = start(client, max_tokens=3000, request_id="p")
        await state_of(client, "p", lambda states: states[0]["num_output_tokens"] > 5)
        assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
        before = (await client.get("/v1/requests/cmpl-p")).json()["requests"][0]
        assert before["wait_reason"] == "the engine is paused"
        late = start(client, max_tokens=4, request_id="late")
        await state_of(
            client,
            "late",
            lambda states: (states[0]["status"], states[0]["wait_reason"]) == ("waiting", "the engine is paused"),
        )
        assert (await client.get("/v1/requests/cmpl-p")).json()["requests"][0] == before
        assert (await client.get("/health")).status_code == 200, "paused is not stuck"
        assert (await client.get("/load")).json()["server_load"] == 2
        await client.post("/resume")
        assert (await task).json()["choices"] == expected
        assert (await late).status_code == 200

    together(server, scenario)


def test_pausing_ends_what_runs_and_empties_the_cache_unless_told_otherwise(server):
    async def scenario(client):
        task = start(client, request_id="x")
        await state_of(client, "x", lambda states: states[0]["status"] == "running")
        await client.post("/pause")
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"
        await client.post("/resume")
        usage = (await client.post("/v1/completions", json=SHORT | {"prompt": [5] * 64})).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    together(server, scenario)


def test_the_cache_is_reset_only_when_nothing_runs_or_when_told_to_preempt(server):
    prompt = SHORT | {"prompt": list(range(64))}

    def cached() -> int:
        return server.post("/v1/completions", prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def scenario(client):
        task = start(client, max_tokens=3000, request_id="c", seed=1, temperature=1.0)
        await state_of(client, "c", lambda states: states[0]["num_output_tokens"] > 5)
        assert (await client.post("/reset_prefix_cache")).status_code == 409
        assert (await client.post("/reset_prefix_cache?reset_running_requests=true")).status_code == 200
        reply = (await task).json()
        alone = await client.post(
            "/v1/completions", json=LONG | {"max_tokens": 3000, "seed": 1, "temperature": 1.0, "request_id": "c"}
        )
        assert reply["choices"] == alone.json()["choices"]

    cached()
    assert cached() == 48
    assert server.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0
    together(server, scenario)


def test_an_engine_sleeps_only_when_nothing_runs_and_the_next_request_wakes_it(server):
    prompt = SHORT | {"prompt": list(range(64)), "seed": 1}

    async def scenario(client):
        task = start(client, request_id="s")
        await state_of(client, "s", lambda states: states[0]["num_output_tokens"] > 5)
        refused = await client.post("/sleep")
        assert refused.status_code == 409 and "requests or sessions are open" in refused.text
        await client.post("/abort_requests", json={"request_ids": ["cmpl-s"]})
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"

    awake = server.post("/v1/completions", prompt).json()
    together(server, scenario)
    # A step of the request that was aborted may still be in flight.
    server.wait_for(lambda: server.post("/sleep").json() == {"status": "asleep"})
    again = server.post("/v1/completions", prompt).json()
    assert again["choices"] == awake["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=wait", None),
        ("/pause?clear_cache=perhaps", None),
        ("/pause?mode=keep&what=1", None),
        ("/reset_prefix_cache?reset_running_requests=2x", None),
        ("/reset_prefix_cache?reset_external=2x", None),
        ("/abort_requests", {}),
        ("/abort_requests", {"request_ids": []}),
        ("/abort_requests", {"request_ids": ["x"], "abort_all": True}),
        ("/abort_requests", {"request_ids": "x"}),
        ("/abort_requests", {"request_ids": ["x" * 10_000]}),
        ("/abort_requests", {"request_ids": ["x"] * 5000}),
        ("/abort_requests", [["x"]]),
    ],
)
def test_what_is_no_order_is_refused(server, path, body):
    reply = server.post(path, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_the_servers_description_has_no_secret_and_no_path(server):
    text = server.http.get(f"{server.url}/server_info").text
    info = json.loads(text)
    assert info["engine"]["max_num_seqs"] == 2
    assert info["settings"]["scheduling_policy"] == "fair"
    assert "/" not in text.replace("://", "")
    assert not {"api_key", "host", "model"} & set(info["settings"])


def test_what_the_engine_measures_of_a_request_adds_up(server):
    names = [f"request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode", "inference")]
    before = {name: server.metric(name) for name in (*names, "e2e_request_latency_seconds_sum")}
    count = "e2e_request_latency_seconds_count"
    num_before = server.metric(count)
    server.post("/v1/completions", LONG | {"max_tokens": 200})
    server.wait_for(lambda: server.metric(count) == num_before + 1)
    queue, prefill, decode, inference, whole = (server.metric(name) - value for name, value in before.items())
    assert prefill + decode == pytest.approx(inference, abs=1e-6)
    assert 0 < queue + inference <= whole + 1e-6
    # The engine tells four times a second.
    server.wait_for(lambda: server.metric("step_seconds_count", part="run") >= 200)
    server.wait_for(lambda: server.metric("iteration_tokens_total_count") >= 200)


def test_a_token_is_really_made_for_health_generate(server):
    before = server.settled_metric("generation_tokens_total")
    assert server.http.get(f"{server.url}/health_generate").status_code == 200
    server.wait_for(lambda: server.metric("generation_tokens_total") == before + 1)
