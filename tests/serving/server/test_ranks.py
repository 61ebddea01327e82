"""A server whose model is shared by ranks: one of them is killed or hangs under load, and no client notices."""

import asyncio
import json
import os
import random
import signal

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import patience
from tests.serving.server.chaos import wait_until_well
from tests.serving.server.running_server import start_server
from tests.serving.server.streams import answers
from tests.serving.server.test_hangs import child
from tokenmill.config.configs import EngineConfig
from tokenmill.model.kernels.native import load_kernels
from tokenmill.serving.server.process.launch import ENGINE_MODULE

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")


def config(folder, **options) -> EngineConfig:
    sizes = {"dtype": "bfloat16", "num_pages": 600, "max_num_seqs": 16, "tensor_parallel_size": 2, "num_threads": 1}
    return EngineConfig(model=str(folder), **{**sizes, **options})


HOW = {"engine_timeout": 4.0, "max_restarts": 10, "tool_call_parser": "hermes", "enable_auto_tool_choice": True}


def test_streams_outlive_a_rank_that_is_killed(tiny_checkpoint):
    with start_server(config(tiny_checkpoint), ENGINE_MODULE, **HOW) as server:
        want = asyncio.run(answers(server.url, 16))
        victim = child(server, "engine_process 0 1")
        assert disturbed(server, 16, victim, signal.SIGKILL) == want
        wait_for_another(server, 1, victim)
        wait_until_well(server)
        server.wait_until_unused()
        # Both ranks were started again, and once: not one for the other's end as well.
        assert server.metric("restarts_total", part="engine") == 1
        assert server.metric("restarts_total", part="engine-rank-1") == 1


def disturbed(server, count, victim, fault):
    """The answers to so many calls, in the middle of which a process is struck."""

    async def call():
        calls = asyncio.ensure_future(answers(server.url, count))
        await asyncio.sleep(random.uniform(0.1, 0.6))
        os.kill(victim, fault)
        return await calls

    return asyncio.run(call())


def wait_for_another(server, rank, victim):
    """Until a rank runs again. Answers that came before the blow say nothing of that."""
    server.wait_for(lambda: server.children().get(f"{ENGINE_MODULE} 0 {rank}") not in (None, victim))


def test_streams_outlive_a_stage_that_is_killed_and_a_rank_of_it_that_hangs(tiny_checkpoint):
    stages = config(tiny_checkpoint, pipeline_parallel_size=2)
    with start_server(stages, ENGINE_MODULE, **HOW) as server:
        want = asyncio.run(answers(server.url, 16))
        victim = child(server, "engine_process 0 2")
        assert disturbed(server, 16, victim, signal.SIGKILL) == want
        wait_for_another(server, 2, victim)
        wait_until_well(server)
        assert disturbed(server, 16, child(server, "engine_process 0 3"), signal.SIGSTOP) == want
        wait_until_well(server)
        server.wait_until_unused()


def test_streams_outlive_a_rank_that_shares_their_context(tiny_checkpoint):
    shared = config(tiny_checkpoint, tensor_parallel_size=1, context_parallel_size=2)
    with start_server(config(tiny_checkpoint, tensor_parallel_size=1), ENGINE_MODULE, **HOW) as server:
        want = asyncio.run(answers(server.url, 16))
    with start_server(shared, ENGINE_MODULE, **HOW) as server:
        assert asyncio.run(answers(server.url, 16)) == want
        (described,) = json.loads(httpx.get(f"{server.url}/server_info", timeout=patience()).text)["engines"]
        assert described["num_ranks"] == 2
        victim = child(server, "engine_process 0 1")
        assert disturbed(server, 16, victim, signal.SIGKILL) == want
        wait_for_another(server, 1, victim)
        wait_until_well(server)


def test_engines_of_two_ranks_each(tiny_checkpoint):
    with start_server(config(tiny_checkpoint), ENGINE_MODULE, data_parallel_size=2, **HOW) as server:
        described = json.loads(httpx.get(f"{server.url}/server_info", timeout=patience()).text)["engines"]
        assert [(one["engine"], one["num_ranks"]) for one in described] == [(0, 2), (1, 2)]
        want = asyncio.run(answers(server.url, 8))
        os.kill(child(server, "engine_process 1 1"), signal.SIGKILL)
        assert asyncio.run(answers(server.url, 8)) == want
        wait_until_well(server)


def test_a_size_that_does_not_fit_ends_the_start_with_one_sentence(tiny_checkpoint):
    with (
        pytest.raises(AssertionError, match=r"--tensor-parallel-size 3: .*what works: 1, 2, 4"),
        start_server(config(tiny_checkpoint, tensor_parallel_size=3), ENGINE_MODULE),
    ):
        pass


@pytest.mark.timeout(400)
def test_killed_ranks_find_their_kv_on_the_disk(tmp_path):
    """After kill -9 of all, and of one rank alone: a page that comes back has the parts of both."""
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=random.randrange(1000))
    prompt = [random.randrange(300) for _ in range(200)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    stored = config(folder, kv_disk=str(tmp_path / "kv"), kv_disk_size=64 << 20, max_num_seqs=4)

    def cached(reply) -> int:
        return reply["usage"]["prompt_tokens_details"]["external_cached_tokens"]

    with start_server(stored, ENGINE_MODULE, served_model_name=("tiny",), **HOW) as server:
        first = server.post("/v1/completions", body).json()
        server.wait_for(lambda: server.metric("kv_stored_tokens_total") >= 192)
        for pid in (server.process.pid, *server.children().values()):
            os.kill(pid, signal.SIGKILL)
    with start_server(stored, ENGINE_MODULE, served_model_name=("tiny",), **HOW) as server:
        again = server.post("/v1/completions", body).json()
        assert (cached(again), again["choices"]) == (192, first["choices"])
        victim = child(server, "engine_process 0 1")
        os.kill(victim, signal.SIGKILL)
        wait_for_another(server, 1, victim)
        wait_until_well(server)
        after = server.post("/v1/completions", body).json()
        assert (cached(after), after["choices"]) == (192, first["choices"])
