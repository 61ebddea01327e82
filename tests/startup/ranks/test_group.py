"""The ranks of an offline engine: what they refuse, how they end, and what becomes of an engine that loses one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import eventually, patience
from tests.serving.server.running_server import children_of, is_alive
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import EngineFailed, InvalidConfig
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm.llm import LLM
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.sharding.shard import Part, Shard, check_size
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.startup.assembly.setup import build_engine

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

SMALL: dict[str, Any] = {"num_pages": 60, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_threads": 1}


def rank_pids() -> list[int]:
    """The ranks that this process has started and that live."""
    return [
        pid for pid, called in children_of(os.getpid()).items() if "tokenmill.startup.assembly.rank_process" in called
    ]


@pytest.mark.parametrize(
    ("family", "shape", "size", "sentence"),
    [
        ("qwen3", {}, 3, "3: the model's 32 hidden numbers cannot be shared evenly; what works: 1, 2, 4$"),
        ("qwen3", {"hidden_size": 48}, 3, "4 query heads and 2 KV heads cannot be shared evenly; what works: 1, 2, 4$"),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8}, 16, "what works: 1, 2, 4, 8$"),
        ("llama", {"intermediate_size": 50}, 4, "the 50 numbers between its projections .* what works: 1, 2$"),
        ("qwen3_moe", {"num_experts": 3}, 4, "it has 3 experts, and each is whole on a rank; what works: 1, 2$"),
        ("olmo2", {}, 2, "its norms of q and k are over the heads of all ranks; what works: 1$"),
        ("qwen3", {}, 65, "at most 64 ranks share a model; what works: 1, 2, 4$"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(
    family: str, shape: dict[str, Any], size: int, sentence: str, tmp_path: Path
) -> None:
    architecture = read_architecture(make_checkpoint(tmp_path, family, tokenizer=False, **shape))
    with pytest.raises(InvalidConfig, match=sentence):
        check_size(architecture, size)
    check_size(architecture, 1)


def test_parts_are_all_there_is_and_nothing_twice() -> None:
    for total in (1, 2, 7, 64, 331):
        for size in (1, 2, 3, 5):
            parts = [Shard(rank, size).part(total) for rank in range(size)]
            assert [place for part in parts for place in range(part.start, part.stop)] == list(range(total))
    assert Part(2, 3, 9).times(4) == Part(8, 12, 36)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3: .*what works: 1, 2, 4"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be at least 1"),
        ({"enable_expert_parallel": True}, "it needs --tensor-parallel-size"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "this model has no experts"),
        ({"pipeline_parallel_size": 3}, "--pipeline-parallel-size 3: each stage needs a layer, and the model has 2"),
        ({"pipeline_parallel_size": 2, "kv_host_size": 1 << 20}, "needs an engine of one rank"),
        ({"nnodes": 2}, "--pipeline-parallel-size must be a multiple of it"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "node_rank": 2}, "--node-rank must be below --nnodes"),
        ({"nnodes": 2, "pipeline_parallel_size": 2}, "--nnodes needs --master-secret FILE"),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2}, "--context-parallel-size 2: .* leave out --tensor"),
        ({"context_parallel_size": 0}, "--context-parallel-size must be at least 1"),
        ({"context_parallel_size": 2, "attention_backend": "reference"}, "--context-parallel-size needs native or cpu"),
        ({"context_parallel_size": 2, "kv_host_size": 1 << 20}, "needs an engine of one rank"),
        ({"context_parallel_size": 2, "kv_disk": "/nowhere"}, "ranks that share one KV have no --kv-disk"),
    ],
)
def test_what_an_engine_refuses(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(InvalidConfig, match=sentence):
        LLM(folder, **SMALL, **options)
    eventually(lambda: not rank_pids())


def test_ranks_that_share_a_context_have_a_part_of_the_kv_each(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    sizes = {"kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_threads": 1}
    ready = []
    for size in (1, 2):
        config = EngineConfig(model=str(folder), device="cpu", context_parallel_size=size, **sizes)
        built = build_engine(config.resolve())
        ready.append(built.ready)
        built.engine.close()
    alone, shared = ready
    assert abs(shared.num_pages - alone.num_pages) <= 2
    assert abs(2 * shared.kv_bytes - alone.kv_bytes) <= alone.kv_bytes // alone.num_pages * 3
    assert shared.weight_bytes == alone.weight_bytes
    assert shared.threads_reason.startswith("of each of 2 ranks that share the context, as weights and KV: ")
    eventually(lambda: not rank_pids())


def test_an_engine_sleeps_and_ends_with_its_ranks(tmp_path: Path) -> None:
    llm = LLM(make_checkpoint(tmp_path, "qwen3"), **SMALL, tensor_parallel_size=2)

    def answer() -> list[int]:
        (output,) = llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True, seed=1))
        return output.outputs[0].token_ids

    before, first = answer(), rank_pids()
    llm.sleep()
    assert rank_pids() == [] and not is_alive(*first)
    llm.wake_up()
    (second,) = rank_pids()
    assert answer() == before and len(before) == 4
    llm.close()
    assert rank_pids() == [] and not is_alive(second)


@pytest.mark.parametrize(("fault", "sentence"), [(signal.SIGKILL, "another rank is gone"), (None, "in time")])
def test_an_engine_that_loses_a_rank_says_so_and_is_not_stuck(
    fault: signal.Signals | None, sentence: str, tmp_path: Path
) -> None:
    llm = LLM(make_checkpoint(tmp_path, "qwen3"), **SMALL, tensor_parallel_size=2)
    (pid,) = rank_pids()
    try:
        group: Any = llm._local.engine.executor
        if fault is None:
            memory = group._group.memory
            memory._timeout = 0.5  # of its messages and of meetings outside of a pass
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineFailed, match=sentence):
                memory.meet()
        else:
            os.kill(pid, fault)
            with pytest.raises(EngineFailed, match=sentence):
                llm.generate(["hello"], SamplingParams(max_tokens=50, ignore_eos=True))
    finally:
        os.kill(pid, signal.SIGKILL)
        llm.close()
    assert rank_pids() == []


PARENT = """
import sys, time
from tokenmill.llm.llm import LLM
llm = LLM(sys.argv[1], num_pages=60, max_num_seqs=4, max_num_batched_tokens=32, num_threads=1, tensor_parallel_size=2)
print("ready", flush=True)
time.sleep(600)
"""


def test_ranks_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None, "it is a pipe"
        assert parent.stdout.readline() == "ready\n"
        (rank,) = children_of(parent.pid)
    finally:
        parent.kill()
        parent.wait(patience())
        parent.stdout.close()  # type: ignore[union-attr]
    eventually(lambda: not is_alive(rank))
