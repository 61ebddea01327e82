"""`--kv-disk`: after kill -9 and a start, a prompt's KV comes from the disk and its answer is bit for bit the same."""

import dataclasses
import os
import random
import signal

import pytest

from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.server.process.launch import ENGINE_MODULE

PROMPT_TOKENS = 400


@pytest.mark.timeout(300)
def test_a_killed_server_finds_its_pages_again_and_the_answer_does_not_change(tiny_checkpoint, tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompt = [rng.randrange(300) for _ in range(PROMPT_TOKENS)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    engine = EngineConfig(
        model=str(tiny_checkpoint), dtype="bfloat16", num_pages=64, max_num_seqs=4, max_num_batched_tokens=64
    )
    with start_server(engine, ENGINE_MODULE, served_model_name=("tiny",)) as server:
        undisturbed = server.post("/v1/completions", body).json()
    assert cached(undisturbed) == 0
    disk = tmp_path / "kv"
    stored = dataclasses.replace(engine, kv_disk=str(disk), kv_disk_size=64 << 20)
    with start_server(stored, ENGINE_MODULE, served_model_name=("tiny",)) as server:
        first = server.post("/v1/completions", body).json()
        assert cached(first) == 0
        # 26 full pages of 16 tokens: the prompt's 25, and the one that the output has filled.
        server.wait_for(lambda: num_records(disk) == 26)
        pids = [server.process.pid, *server.children().values()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    with start_server(stored, ENGINE_MODULE, served_model_name=("tiny",)) as server:
        again = server.post("/v1/completions", body).json()
        details = again["usage"]["prompt_tokens_details"]
        assert (details["local_cached_tokens"], details["external_cached_tokens"]) == (0, cached(again))
        assert cached(again) >= 0.95 * (PROMPT_TOKENS - 1) // 16 * 16
        assert again["choices"] == first["choices"] == undisturbed["choices"]
        server.wait_until_unused()
        assert server.post("/reset_prefix_cache").status_code == 200
        assert cached(server.post("/v1/completions", body).json()) == cached(again), "what is on the disk stays"
        server.wait_until_unused()
        assert server.post("/reset_prefix_cache?reset_external=true").status_code == 200
        assert cached(server.post("/v1/completions", body).json()) == 0


@pytest.mark.timeout(300)
def test_each_replica_finds_what_any_has_stored_also_after_kill_9(tiny_checkpoint, tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompt, disk = [rng.randrange(300) for _ in range(PROMPT_TOKENS)], tmp_path / "kv"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=64, kv_disk=str(disk))
    engine = dataclasses.replace(engine, max_num_seqs=4, max_num_batched_tokens=64, kv_disk_size=64 << 20)
    # Of two idle engines each gets a request in turn.
    two = {"data_parallel_size": 2, "routing_policy": "fewest", "served_model_name": ("tiny",)}
    with start_server(engine, ENGINE_MODULE, **two) as server:
        first = server.post("/v1/completions", body).json()
        assert cached(first) == 0
        server.wait_for(lambda: num_records(disk) == 26)
        assert_found(server.post("/v1/completions", body).json(), first)
        server.wait_for(lambda: of_engines(server, "generation_tokens_total") == [20, 20])
        for pid in [server.process.pid, *server.children().values()]:
            os.kill(pid, signal.SIGKILL)
    with start_server(engine, ENGINE_MODULE, **two) as server:
        for _ in range(2):
            assert_found(server.post("/v1/completions", body).json(), first)
        server.wait_for(lambda: of_engines(server, "generation_tokens_total") == [20, 20])


def assert_found(reply, first) -> None:
    """Check that a reply's prompt came from the disk, and that it is the first reply again."""
    assert reply["choices"] == first["choices"]
    assert reply["usage"]["prompt_tokens_details"]["external_cached_tokens"] >= 0.95 * (PROMPT_TOKENS - 1) // 16 * 16


def of_engines(server, name) -> list[float]:
    return [server.metric(name, engine=str(number)) for number in (0, 1)]


def cached(reply) -> int:
    details = reply["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


def num_records(folder) -> int:
    """Records of 16 + 24 + 64 + 4 bytes behind the header's line."""
    files = [index.read_bytes() for index in folder.glob("*.index")]
    return sum(len(data[data.index(b"\n") + 1 :]) for data in files) // (4 + 4 + 16 + 64 + 4)
