"""More requests than may wait: 429 with Retry-After for the surplus, and an answer for everyone else."""

import asyncio
import concurrent.futures
import contextlib

import openai
import pytest

from tests.checkpoints import make_checkpoint
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("model"))
    engine = EngineConfig(model=str(folder), dtype="float32", max_num_seqs=2)
    limits = {"max_num_queued_reqs": 3, "max_num_queued_tokens": 2000}
    with start_server(engine, "tokenmill.startup.assembly.engine_process", **limits) as running:
        yield running


async def ask(client: openai.AsyncOpenAI, number: int):
    return await client.completions.create(
        model=(await client.models.list()).data[0].id,
        prompt=f"number {number}",
        max_tokens=150,
        extra_body={"ignore_eos": True},
    )


def test_the_surplus_is_refused_at_once_and_the_rest_is_answered(server):
    async def burst():
        async with server.async_client as client:
            return await asyncio.gather(*(ask(client, number) for number in range(30)), return_exceptions=True)

    answers = asyncio.run(burst())
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    served = [answer for answer in answers if not isinstance(answer, Exception)]
    assert len(refused) + len(served) == 30
    assert len(served) >= 5, "two rows and three places in the queue"
    assert refused, "30 at once are more than that"
    for error in refused:
        assert 1 <= int(error.response.headers["Retry-After"]) <= 600
        assert error.body["code"] == "queue_full"
        assert "wait already for a row or KV pages and this call brings 1; at most 3 may wait" in error.body["message"]
    assert all(answer.usage.completion_tokens == 150 for answer in served)
    server.wait_until_unused()


def test_a_large_request_is_served_by_an_idle_server_whatever_the_limits(server):
    answer = server.post("/v1/completions", {"prompt": "x", "n": 9, "max_tokens": 3, "ignore_eos": True})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 27


def num_open(server):
    return server.http.get(f"{server.url}/load").json()["server_load"]


@contextlib.contextmanager
def full_queue(server):
    """Two rows are taken and three requests wait, for as long as this lasts."""
    body = {"prompt": "x", "max_tokens": 3}
    server.wait_for(lambda: num_open(server) == 0)
    assert server.post("/pause?mode=keep").status_code == 200
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        replies = [pool.submit(server.post, "/v1/completions", body) for _ in range(5)]
        try:
            server.wait_for(lambda: num_open(server) == 5)
            yield
        finally:
            assert server.post("/resume").status_code == 200
        assert [reply.result().status_code for reply in replies] == [200] * 5


def test_a_response_in_the_background_is_refused_like_any_other(server):
    with full_queue(server):
        for fields in ({}, {"background": True}, {"background": True, "store": True}):
            reply = server.post("/v1/responses", {"input": "x", "max_output_tokens": 1} | fields)
            assert reply.status_code == 429, (fields, reply.text)
            assert int(reply.headers["Retry-After"]) >= 1
            assert reply.json()["error"]["code"] == "queue_full"
    reply = server.post("/v1/responses", {"input": "x", "max_output_tokens": 1, "background": True})
    assert (reply.status_code, reply.json()["status"]) == (200, "queued")
    # It is answered before it has reached the engine, where nothing is used as yet.
    place = f"{server.url}/v1/responses/{reply.json()['id']}"
    server.wait_for(lambda: server.http.get(place).json()["status"] in ("completed", "incomplete"))


def test_who_is_refused_is_told_what_waits_and_what_would(server):
    with full_queue(server):
        reply = server.post("/v1/completions", {"prompt": "x", "n": 4})
        expected = "3 requests wait already for a row or KV pages and this call brings 4; at most 3 may wait"
        assert expected in reply.json()["error"]["message"]
        assert "--max-num-queued-reqs" in reply.json()["error"]["message"]
    server.wait_until_unused()
