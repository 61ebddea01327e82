"""Sessions over HTTP on a real server: turns are one growing prompt, wait for each other, and belong to a key.

The server has two API processes and two engines: no client can tell which of them it has, nor that there are several.
"""

import asyncio
import json
import os
import signal

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.serving.server.running_server import start_server
from tests.threats.conftest import KEYS
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

PAGE = 16
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
INPUTS = ["the quick brown fox jumps over the lazy dog, twice", " and then it comes back", " to do it again"]
ENGINES = "tokenmill.startup.assembly.engine_process"
TEXT_WORKERS = "tokenmill.serving.frontend.worker"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096)
    engine = EngineConfig(model=str(model), num_pages=600, page_size=PAGE, max_num_seqs=8)
    several = {"api_server_count": 2, "data_parallel_size": 2}
    with start_server(engine, ENGINE_MODULE, api_key=KEYS, max_restarts=5, sse_ping=0.1, **several) as running:
        yield running


class Key:
    """A client with a key of its own."""

    def __init__(self, server, key=KEYS[0]):
        self.headers = {"Authorization": f"Bearer {key}"}
        self.url = server.url
        self.http = httpx.Client(base_url=server.url, headers=self.headers, timeout=60)

    def ask(self, method, path, body=None, session=None, status=200):
        headers = {} if session is None else {"x-session-id": session}
        reply = self.http.request(method, path, json=body if method == "POST" else None, headers=headers)
        assert reply.status_code == status, (path, reply.status_code, reply.text)
        return reply.json()

    def open(self, **fields):
        return self.ask("POST", "/v1/sessions", fields)["id"]

    def shown(self, session):
        return self.ask("GET", f"/v1/sessions/{session}")

    def metric(self, name, **labels):
        lines = self.http.get("/metrics").text.splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if line.startswith(f"tokenmill:{name}") and all(one in line for one in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@pytest.fixture
def key(server):
    return Key(server)


def test_turns_of_a_text_are_one_growing_prompt(key):
    session, whole = key.open(kind="text"), []
    for number, text in enumerate(INPUTS):
        path = f"/v1/sessions/{session}/input" if number % 2 else "/v1/completions"
        turn = key.ask("POST", path, GREEDY | {"prompt": text}, session if path == "/v1/completions" else None)
        added = key.ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": not number})["tokens"]
        cached = turn["usage"]["prompt_tokens_details"]["cached_tokens"]
        # All but the last page that was full: what one growing prompt finds in the cache. The last token never ran.
        assert cached == max(0, len(whole) - 1) // PAGE * PAGE
        whole += added
        fresh = key.ask("POST", "/v1/completions", GREEDY | {"prompt": whole, "cache_salt": f"{session}{number}"})
        assert turn["choices"][0]["prompt_token_ids"] == whole
        assert turn["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]
        assert turn["usage"]["prompt_tokens"] == len(whole)
        whole += turn["choices"][0]["token_ids"]
        shown = key.shown(session)
        assert (shown["num_turns"], shown["num_tokens"], shown["open_turns"]) == (number + 1, len(whole), [])
    assert key.ask("DELETE", f"/v1/sessions/{session}")["deleted"]
    key.ask("GET", f"/v1/sessions/{session}", status=404)


def test_a_stop_token_is_not_part_of_what_the_next_turn_sees(key):
    first = key.ask("POST", "/v1/completions", GREEDY | {"prompt": INPUTS[0]})["choices"][0]["token_ids"]
    stop = first[3]
    ended = first[: first.index(stop) + 1]
    for shows, kept in ((False, ended[:-1]), (True, ended)):
        session = key.open(kind="text")
        body = GREEDY | {"prompt": INPUTS[0], "stop_token_ids": [stop], "include_stop_str_in_output": shows}
        turn = key.ask("POST", "/v1/completions", body, session)
        assert (turn["choices"][0]["finish_reason"], turn["choices"][0]["token_ids"]) == ("stop", ended)
        begun = len(key.ask("POST", "/tokenize", {"prompt": INPUTS[0]})["tokens"])
        assert key.shown(session)["num_tokens"] == begun + len(kept)


@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_a_chat_are_the_conversation(key, stream):
    session, said = key.open(), []
    for text in ("hello", "and again?"):
        asked = [{"role": "user", "content": text}]
        reply = answer(key, GREEDY | {"messages": asked, "stream": stream}, session)
        said += asked
        whole = answer(key, GREEDY | {"messages": said, "cache_salt": f"{session}{text}"})
        assert reply == whole
        said.append({"role": "assistant", "content": reply})
    assert key.shown(session)["num_messages"] == 4


def answer(key, body, session=None):
    """The text of a chat's answer."""
    headers = {} if session is None else {"x-session-id": session}
    reply = key.http.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_input_that_comes_during_a_turn_is_taken_when_it_ends(server, key):
    async def scenario(session):
        async with httpx.AsyncClient(base_url=server.url, headers=key.headers, timeout=60) as client:
            await client.post("/pause?mode=keep")  # no turn is over before all have come
            calls = []
            for text in INPUTS:
                post = client.post(f"/v1/sessions/{session}/input", json=GREEDY | {"prompt": text})
                calls.append(asyncio.ensure_future(post))
                await asyncio.to_thread(server.wait_for, lambda: len(key.shown(session)["open_turns"]) == len(calls))
            await client.post("/resume")
            return [(await call).json() for call in calls]

    session = key.open(kind="text")
    turns = asyncio.run(scenario(session))
    whole = []
    for number, turn in enumerate(turns):
        whole += key.ask("POST", "/tokenize", {"prompt": INPUTS[number], "add_special_tokens": not number})["tokens"]
        assert turn["usage"]["prompt_tokens"] == len(whole), "in the order in which they came"
        whole += turn["choices"][0]["token_ids"]
    assert key.shown(session)["num_turns"] == 3


def long_turn(key, session, **fields):
    """The lines of a stream that runs for long."""
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True, "temperature": 0} | fields
    return key.http.stream("POST", "/v1/completions", json=body, headers={"x-session-id": session})


def test_abort_answers_the_running_turn_with_what_it_has_and_refuses_those_that_wait(server, key):
    session = key.open(kind="text")

    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, headers=key.headers, timeout=60) as client:
            headers = {"x-session-id": session}
            body = {"prompt": "x", "max_tokens": 220, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            # Paused, the engine gives the first turn nothing: it cannot end before it is aborted.
            await client.post("/pause?mode=keep")
            calls = []
            for number in range(2):
                calls.append(
                    asyncio.ensure_future(
                        client.post("/v1/completions", json=body | {"request_id": f"a{number}"}, headers=headers)
                    )
                )
                await asyncio.to_thread(
                    server.wait_for, lambda number=number: len(key.shown(session)["open_turns"]) == number + 1
                )
            assert key.shown(session)["open_turns"] == ["cmpl-a0", "cmpl-a1"]
            assert key.shown(session)["expires_at"] is None
            await asyncio.to_thread(
                server.wait_for, lambda: key.http.get("/v1/requests/cmpl-a0").json().get("session") == session
            )
            waiting = key.ask("GET", "/v1/requests/cmpl-a1")
            assert waiting["session"] == session
            assert "earlier turn" in waiting["requests"][0]["wait_reason"]
            assert key.ask("POST", f"/v1/sessions/{session}/abort", {})["num_aborted"] == 2
            first, second = [await call for call in calls]
            await client.post("/resume")
            return first, second

    first, second = asyncio.run(scenario())
    assert (first.status_code, second.status_code) == (200, 409)
    assert first.json()["choices"][0]["finish_reason"] == "abort"
    assert second.json()["error"]["message"].count(".") <= 1
    server.wait_for(lambda: key.shown(session)["open_turns"] == [])
    assert key.shown(session)["num_turns"] == 1, "what was answered is kept"
    key.ask("POST", "/v1/completions", GREEDY | {"prompt": "y"}, session)


def test_a_turn_whose_client_leaves_can_be_sent_again(server, key):
    session = key.open(kind="text")
    with long_turn(key, session) as reply:
        next(reply.iter_lines())
    server.wait_for(lambda: key.shown(session)["open_turns"] == [])
    assert (key.shown(session)["num_turns"], key.shown(session)["num_tokens"]) == (0, 0)
    turn = key.ask("POST", "/v1/completions", GREEDY | {"prompt": "x"}, session)
    fresh = key.ask("POST", "/v1/completions", GREEDY | {"prompt": "x"})
    assert turn["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]


def test_an_idle_session_expires_and_a_busy_one_does_not(server, key):
    before = key.metric("sessions_ended_total", reason="expired")
    session = key.open(kind="text", idle_timeout=0.3)
    turn = key.ask("POST", "/v1/completions", GREEDY | {"prompt": "x", "max_tokens": 100}, session)
    assert turn["usage"]["completion_tokens"] == 100
    server.wait_for(lambda: key.http.get(f"/v1/sessions/{session}").status_code == 404)
    server.wait_for(lambda: key.metric("sessions_ended_total", reason="expired") == before + 1)
    error = key.ask("POST", "/v1/completions", GREEDY | {"prompt": "x"}, session, status=404)["error"]
    assert error["message"] == "no open session has this id"


def test_another_keys_session_is_not_there(server, key):
    session, other = key.open(kind="text"), Key(server, KEYS[1])
    turn = {"prompt": "x"}
    for method, path, body, named in (
        ("GET", f"/v1/sessions/{session}", None, None),
        ("DELETE", f"/v1/sessions/{session}", None, None),
        ("POST", f"/v1/sessions/{session}/abort", {}, None),
        ("POST", f"/v1/sessions/{session}/input", turn, None),
        ("POST", "/v1/completions", turn, session),
    ):
        error = other.ask(method, path, body, named, status=404)["error"]
        assert error["message"] == "no open session has this id"
    assert session not in [one["id"] for one in other.ask("GET", "/v1/sessions")["data"]]
    assert session in [one["id"] for one in key.ask("GET", "/v1/sessions")["data"]]
    assert key.metric("num_sessions") >= 1


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "prompt"),
        ({"prompt": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"prompt": "x", "max_tokens": 0, "echo": True}, "max_tokens"),
        ({"prompt": "x" * 5000}, None),
        ({"prompt": [10**6]}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"messages": []}, "prompt"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_and_leaves_the_session_as_it_was(key, body, named):
    session = key.open(kind="text")
    key.ask("POST", "/v1/completions", GREEDY | {"prompt": "x"}, session)
    before = key.shown(session)
    for path, header in ((f"/v1/sessions/{session}/input", None), ("/v1/completions", session)):
        error = key.ask("POST", path, body, header, status=400)["error"]
        assert error["message"]
        assert named is None or error["param"] == named
    after = key.shown(session)
    assert {name: after[name] for name in ("num_turns", "num_tokens")} == {
        name: before[name] for name in ("num_turns", "num_tokens")
    }


def test_a_session_has_one_kind_and_bounds(key):
    for fields, param in (({"kind": "audio"}, "kind"), ({"idle_timeout": 0}, "idle_timeout"), ({"x": 1}, "x")):
        assert key.ask("POST", "/v1/sessions", fields, status=400)["error"]["param"] == param
    session = key.open()
    assert "chat" in key.ask("POST", "/v1/completions", {"prompt": "x"}, session, status=400)["error"]["message"]
    hello = {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}
    key.ask("POST", "/v1/chat/completions", hello, session, status=400)
    error = key.ask("POST", "/v1/responses", {"input": "x", "max_output_tokens": 2}, session, status=400)["error"]
    assert (error["param"], session in error["message"]) == ("x-session-id", True)
    # Any other name is a label of the client's own, which only chooses an engine.
    key.ask("POST", "/v1/completions", {"prompt": "x"}, "sess_mine")


@pytest.mark.parametrize("module", [ENGINES, TEXT_WORKERS])
def test_a_session_goes_on_after_its_parts_were_killed(server, key, module):
    pids = [pid for name, pid in server.children().items() if name.startswith(module)]
    assert len(pids) == 2
    session = key.open(kind="text")
    begun = key.ask("POST", "/v1/completions", GREEDY | {"prompt": INPUTS[0]}, session)
    whole = key.ask("POST", "/tokenize", {"prompt": INPUTS[0]})["tokens"] + begun["choices"][0]["token_ids"]
    body = GREEDY | {"prompt": INPUTS[1], "max_tokens": 400, "stream": True}
    tokens = []
    with key.http.stream("POST", "/v1/completions", json=body, headers={"x-session-id": session}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                if not tokens:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    assert len(tokens) == 400, "nothing is lost, and nothing comes twice"
    whole += key.ask("POST", "/tokenize", {"prompt": INPUTS[1], "add_special_tokens": False})["tokens"]
    fresh = key.ask("POST", "/v1/completions", GREEDY | {"prompt": whole, "max_tokens": 400})
    assert fresh["choices"][0]["token_ids"] == tokens
    whole += tokens
    assert key.shown(session)["num_tokens"] == len(whole)
    last = key.ask("POST", "/v1/completions", GREEDY | {"prompt": [5, 6]}, session)
    assert last["usage"]["prompt_tokens"] == len(whole) + 2


def test_a_stream_that_waits_for_an_earlier_turn_gets_signs_of_life(server, key):
    session = key.open(kind="text")

    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, headers=key.headers, timeout=60) as client:
            await client.post("/pause?mode=keep")
            url = f"/v1/sessions/{session}/input"
            first = asyncio.ensure_future(client.post(url, json=GREEDY | {"prompt": "x"}))
            await asyncio.to_thread(server.wait_for, lambda: key.shown(session)["open_turns"])
            async with client.stream("POST", url, json=GREEDY | {"prompt": "y", "stream": True}) as reply:
                lines = reply.aiter_lines()
                assert await anext(lines) == ": ping"
                assert len(key.shown(session)["open_turns"]) == 2
                await client.post("/resume")
                rest = [line async for line in lines]
            assert (await first).status_code == 200
            return rest

    assert asyncio.run(scenario())[-2] == "data: [DONE]"
    assert key.shown(session)["num_turns"] == 2


def test_a_turns_timeout_counts_from_its_arrival(server, key):
    session = key.open(kind="text")
    key.http.post("/pause?mode=keep")
    try:
        error = key.ask("POST", "/v1/completions", {"prompt": "x", "timeout": 0.2}, session, status=408)["error"]
        assert "0.2 seconds" in error["message"]
    finally:
        key.http.post("/resume")
    server.wait_for(lambda: key.shown(session)["open_turns"] == [])


def test_a_server_that_stops_still_answers_turns_that_wait(slow_model):
    async def scenario(server):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            session = (await client.post("/v1/sessions", json={"kind": "text"})).json()["id"]
            await client.post("/pause?mode=keep")
            calls = []
            for number in range(2):
                body = {"prompt": "x" * 10, "max_tokens": 20}
                calls.append(asyncio.ensure_future(client.post(f"/v1/sessions/{session}/input", json=body)))
                while len((await client.get(f"/v1/sessions/{session}")).json()["open_turns"]) <= number:
                    pass
            await client.post("/resume")
            server.process.send_signal(signal.SIGINT)
            return [await call for call in calls]

    with start_server(EngineConfig(model=str(slow_model)), shutdown_timeout=30.0) as server:
        replies = asyncio.run(scenario(server))
        assert [reply.status_code for reply in replies] == [200, 200]
        assert [reply.json()["usage"]["prompt_tokens"] for reply in replies] == [10, 40]
        assert server.wait_for_end(30) == 0
