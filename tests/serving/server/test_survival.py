"""Engines and text workers are killed under load: every stream is whole, and the same as without that."""

import concurrent.futures
import os
import random
import signal
from pathlib import Path

import httpx
import pytest

from tests.eventually import join, patience
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.chaos import FAULTS, POISONS, check, start
from tests.serving.server.killing_engine import KILLS
from tests.serving.server.packing_engine import PACKS
from tests.serving.server.running_server import start_server
from tests.serving.server.test_hangs import child
from tests.serving.server.test_lifecycle import open_stream
from tokenmill.config.configs import EngineConfig


@pytest.mark.parametrize(
    ("engines", "faults"), [(1, ["a text worker is killed", "a native kernel crashes", *POISONS]), (2, FAULTS)]
)
def test_streams_outlive_whatever_happens_to_a_part(tiny_checkpoint, engines, faults):
    """The long form is `make chaos`."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with start(tiny_checkpoint, engines) as server:
        lasted = check(server, 12, rng.sample(list(faults), len(faults)), rng)
        assert sorted(fault for fault, _ in lasted) == sorted(faults)
        assert "was killed by SIGSEGV" in server.output()


def test_a_request_that_kills_engines_ends_alone(tiny_checkpoint):
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=400, max_num_seqs=12)
    with start_server(engine, "tests.serving.server.killing_engine") as server:
        body = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
        prompts = [[20 + number, 3] for number in range(6)]
        undisturbed = [completion(server, body | {"prompt": prompt, "seed": 1}).json() for prompt in prompts]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(completion, server, body | {"prompt": prompt, "seed": 1}) for prompt in prompts[:3]]
            poison = pool.submit(completion, server, body | {"prompt": [KILLS, 3]})
            calls += [pool.submit(completion, server, body | {"prompt": prompt, "seed": 1}) for prompt in prompts[3:]]
            assert poison.result().status_code == 500
            assert "died twice while it ran this request" in poison.result().json()["error"]["message"]
            texts = [call.result().json()["choices"] for call in calls]
        assert texts == [reply["choices"] for reply in undisturbed]
        server.wait_for(lambda: httpx.get(f"{server.url}/health", timeout=patience()).status_code == 200)
        server.wait_until_unused()
        assert server.output().count("the engine process was killed by SIGKILL") == 2


def test_a_stream_says_that_it_waits_for_an_engine_and_the_third_death_ends_the_server(tmp_path):
    # A server whose streams have just begun looks after five seconds, then every second.
    stub = {"step_seconds": 0.05, "restart_seconds": 7.0}
    model = write_folder(tmp_path / "slow", byte_level_tokenizer(), config={"stub": stub})
    with start_server(EngineConfig(model=str(model))) as server:
        lines: list[str] = []
        thread = open_stream(server, lines, max_tokens=500)
        for number in range(1, 4):
            os.kill(child(server, "stub_engine"), signal.SIGKILL)
            server.wait_for(lambda number=number: server.output().count("was killed by SIGKILL") == number)
            if number == 1:
                server.wait_for(lambda: ": recovering" in lines)
            server.wait_for(lambda: server.process.poll() is not None or "stub_engine" in " ".join(server.children()))
        assert server.wait_for_end() == 1
        join(thread)
        assert '"type":"engine_unavailable"' in lines[-2]
        assert "3 deaths in a minute" in server.output()


def completion(server, body) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=patience())


@pytest.mark.parametrize("has_cache", [True, False])
def test_an_engine_that_comes_back_maps_the_weights_of_the_dead_one(tiny_checkpoint, tmp_path, has_cache):
    own = {"weight_cache": has_cache, "weight_cache_dir": str(tmp_path)}
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=400, **own)
    with start_server(engine, "tests.serving.server.packing_engine") as server:
        body = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "prompt": [20, 3]}
        before = completion(server, body).json()["choices"]
        first = child(server, "packing_engine")
        os.kill(first, signal.SIGKILL)
        assert completion(server, body).json()["choices"] == before
        maps = Path(f"/proc/{child(server, 'packing_engine')}/maps").read_text()
        shared = [line for line in maps.splitlines() if str(tmp_path) in line or "memfd:tokenmill-weights" in line]
        assert child(server, "packing_engine") != first
        assert ["r--s" in line for line in shared] == [True]
        assert (str(tmp_path) in shared[0]) == has_cache
        assert server.output().count(f"[engine] {PACKS}") == 1
