"""Prompts computed by one server, continued by another, whatever happens to either, and whatever they do not share."""

import asyncio
import os
import random
import signal
import threading

import pytest

from tests.serving.server.running_proxy import start_proxy
from tests.serving.server.running_server import start_server
from tests.serving.server.split_servers import (
    PARSERS,
    body_of,
    choices,
    computed_prompt,
    engine_config,
    engine_of,
    fresh_prompt,
    num_cached,
    start_split,
    transfer_config,
)
from tests.serving.server.streams import answers
from tokenmill.serving.server.process.launch import ENGINE_MODULE


def test_a_producer_that_is_killed_costs_nothing_but_time(tiny_checkpoint, tmp_path):
    with start_split(tiny_checkpoint, tmp_path, "unix", fetch_seconds=10.0, server=PARSERS) as split:
        alone = asyncio.run(answers(split.decode.url, 16))
        assert split.decode.post("/reset_prefix_cache").status_code == 200
        killer = threading.Timer(random.uniform(0.1, 1.0), split.kill_producer)
        killer.start()
        heard = asyncio.run(answers(split.proxy, 16))
        killer.join()
        for number, (want, got) in enumerate(zip(alone, heard, strict=True)):
            assert got == want, f"stream {number}"
        split.decode.wait_until_unused()
        assert "Traceback" not in split.decode.output()


def test_a_producer_that_hangs_is_given_up(tiny_checkpoint, tmp_path):
    with start_split(tiny_checkpoint, tmp_path, "tcp", fetch_seconds=1.0) as split:
        prompt = fresh_prompt()
        params = computed_prompt(split.prefill, prompt)
        engine = engine_of(split.prefill)
        os.kill(engine, signal.SIGSTOP)
        try:
            reply = split.decode.post("/v1/completions", body_of(prompt, kv_transfer_params=params))
            assert num_cached(reply) == 0
        finally:
            os.kill(engine, signal.SIGCONT)
        assert choices(reply) == choices(split.decode.post("/v1/completions", body_of(prompt, cache_salt="own")))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the place of the shared producer's socket."""
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def producer(tiny_checkpoint, place):
    """One that outlives its consumers."""
    config = transfer_config("kv_producer", place, "unix", 0, lease_seconds=8.0)
    with start_server(engine_config(tiny_checkpoint, config), ENGINE_MODULE) as server:
        yield server


@pytest.fixture
def consumer(producer, tiny_checkpoint, place):
    """Starts a consumer of what that computes: with a policy for pages that do not come, and an engine's fields."""

    def start(policy: str = "recompute", **fields):
        config = transfer_config("kv_consumer", place, "unix", 0, policy=policy)
        return start_server(engine_config(tiny_checkpoint, config, **fields), ENGINE_MODULE)

    return start


def test_a_consumer_that_is_killed_leaves_its_pages_to_the_end_of_their_leases(producer, consumer):
    with consumer() as decode:
        decode.process.kill()
        os.kill(decode.api_pid, signal.SIGKILL)
        for _ in range(5):
            computed_prompt(producer, fresh_prompt(200))
        producer.wait_for(lambda: producer.metric("num_pages_pinned") > 0)  # told once a second
        producer.wait_until_unused()  # without any request that would stir the engine


def test_with_the_policy_fail_a_request_ends_with_an_error(producer, consumer):
    with consumer(policy="fail") as decode:
        prompt = fresh_prompt()
        params = computed_prompt(producer, prompt)
        wrong = body_of(prompt, kv_transfer_params=params | {"remote_block_ids": [1, 2, 3, 4]})
        reply = decode.post("/v1/completions", wrong)
        assert reply.status_code == 500
        assert "could not be loaded" in reply.json()["error"]["message"]
        decode.wait_until_unused()


def test_engines_with_other_pages_compute_alone(producer, consumer):
    """Other page sizes are refused by name, and nothing is guessed."""
    with consumer(page_size=32) as decode, start_proxy([producer.url], [decode.url]) as proxy:
        prompt = fresh_prompt()
        reply = proxy.post("/v1/completions", body_of(prompt))
        assert num_cached(reply) == 0
        assert choices(reply) == choices(producer.post("/v1/completions", body_of(prompt)))
        assert "the producer has pages of 16 tokens, this engine pages of 32 tokens" in decode.output()


def test_both_roles_in_one_server(tiny_checkpoint, tmp_path):
    """Each continues what the other has computed for it."""
    configs = [transfer_config("kv_both", tmp_path, "unix", 0, own=i, peer=1 - i) for i in range(2)]
    with (
        start_server(engine_config(tiny_checkpoint, configs[0]), ENGINE_MODULE) as one,
        start_server(engine_config(tiny_checkpoint, configs[1]), ENGINE_MODULE) as two,
    ):
        for first, second in ((one, two), (two, one)):
            with start_proxy([first.url], [second.url]) as proxy:
                body = body_of(fresh_prompt())
                reply = proxy.post("/v1/completions", body)
                assert num_cached(reply) == 96
                assert choices(reply) == choices(first.post("/v1/completions", body))
