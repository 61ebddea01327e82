"""The real engine behind the real server, with a small random checkpoint and the official client."""

import asyncio
import os
import random
import signal

import pytest

from tests.checkpoints import make_checkpoint
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
NUM_PAGES = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def server(checkpoint):
    engine = EngineConfig(model=str(checkpoint), num_pages=NUM_PAGES, max_num_seqs=16)
    with start_server(engine, ENGINE_MODULE) as running:
        yield running


def chat(server, **fields):
    fields = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}} | fields
    return server.client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)


def contents(reply) -> list[str]:
    return [choice.message.content for choice in reply.choices]


def test_greedy_is_repeatable_and_the_prompt_is_cached(server):
    first = chat(server)
    second = chat(server)
    assert contents(first) == contents(second)
    assert contents(first)[0]
    usage = second.usage
    assert usage.completion_tokens == 12
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16


def test_a_stream_is_the_whole_text(server):
    deltas = [chunk.choices[0].delta.content or "" for chunk in chat(server, max_tokens=60, stream=True)]
    assert "".join(deltas) == contents(chat(server, max_tokens=60))[0]


def test_one_seed_gives_one_text_and_n_gives_different_ones(server):
    sampled = {"temperature": 1.0, "seed": 7, "n": 2, "max_tokens": 24}
    first, second = (contents(chat(server, **sampled)) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    assert contents(chat(server, **sampled | {"seed": 8})) != first


def test_a_stop_string_cuts_the_text(server):
    text = contents(chat(server, max_tokens=40))[0]
    stop = text[10:14]
    reply = chat(server, max_tokens=40, stop=[stop])
    assert contents(reply)[0] == text[: text.index(stop)]
    assert (reply.choices[0].finish_reason, reply.choices[0].stop_reason) == ("stop", stop)


def test_logprobs_agree_with_greedy(server):
    reply = chat(server, max_tokens=5, logprobs=True, top_logprobs=3)
    for entry in reply.choices[0].logprobs.content:
        assert entry.logprob == max(e.logprob for e in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3


def test_logit_bias_and_stop_token_ids_reach_the_sampler(server):
    body = {"prompt": "a", "max_tokens": 4, "logit_bias": {"70": 100}, "return_token_ids": True, "temperature": 0}
    choice = server.post("/v1/completions", body | {"ignore_eos": True}).json()["choices"][0]
    assert choice["token_ids"] == [70] * 4
    choice = server.post("/v1/completions", body | {"stop_token_ids": [70]}).json()["choices"][0]
    assert (choice["token_ids"], choice["stop_reason"], choice["text"]) == ([70], 70, "")


def test_a_prompt_over_the_context_is_refused_by_the_code_that_clients_look_for(server):
    reply = server.post("/v1/completions", {"prompt": [5] * 512})
    assert reply.status_code == 400
    assert "maximum context length is 512 tokens" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert server.post("/v1/completions", {"prompt": [5] * 511}).json()["usage"]["completion_tokens"] == 1


def test_salts_do_not_share_the_cache(server):
    body = {"prompt": [9] * 100, "max_tokens": 1}
    for salt in ("one", "two"):
        reply = server.post("/v1/completions", body | {"cache_salt": salt}).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = server.post("/v1/completions", body | {"cache_salt": "one"}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_64_streams_with_disconnects_equal_the_greedy_answer_and_free_everything(server):
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    jobs = [(rng.randrange(1, 30), rng.randrange(2, 100), rng.random() < 0.2) for _ in range(64)]

    async def run(client, prompt_length, length, leaves):
        stream = await client.completions.create(
            model="tiny",
            prompt=list(range(5, 5 + prompt_length)),
            max_tokens=length,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves and rng.random() < 0.1:
                await stream.close()
                return None
        return text

    async def run_all():
        async with server.async_client as client:
            return await asyncio.gather(*(run(client, *job) for job in jobs))

    texts = asyncio.run(run_all())
    server.wait_until_unused()
    for (prompt_length, length, _), text in list(zip(jobs, texts, strict=True))[::6]:
        if text is not None:
            body = {"prompt": list(range(5, 5 + prompt_length)), "max_tokens": length, "temperature": 0}
            alone = server.post("/v1/completions", body | {"ignore_eos": True}).json()["choices"][0]["text"]
            assert text == alone, f"seed {seed}"
    assert server.metric("num_pages_evictable") <= NUM_PAGES


def test_without_text_workers_it_serves_and_ends_within_five_seconds_under_load(checkpoint, server):
    engine = EngineConfig(model=str(checkpoint), num_pages=NUM_PAGES)
    with start_server(engine, ENGINE_MODULE, tokenizer_workers=0, shutdown_timeout=1.0) as other:
        assert len(other.children()) == 1
        assert contents(chat(other)) == contents(chat(server))
        stream = chat(other, max_tokens=400, stream=True)
        next(iter(stream))
        other.process.send_signal(signal.SIGINT)
        assert other.wait_for_end(60) == 0
        assert "Traceback" not in other.output()


def test_with_two_text_workers_it_serves_and_a_killed_engine_ends_it_with_a_message(checkpoint, server):
    engine = EngineConfig(model=str(checkpoint), num_pages=NUM_PAGES)
    with start_server(engine, ENGINE_MODULE, tokenizer_workers=2, max_restarts=0) as other:
        for _ in range(2):
            assert contents(chat(other)) == contents(chat(server))
        (pid,) = [pid for name, pid in other.children().items() if "engine" in name]
        os.kill(pid, signal.SIGKILL)
        assert other.wait_for_end(60) == 1
        assert "the engine process was killed by SIGKILL" in other.output()
