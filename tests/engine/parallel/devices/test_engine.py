"""An engine over two devices that do not exist: what clients are told is what one device tells them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.parallel.devices.counting import Call, CountingCommunicator, RankPlatform
from tests.engine.runner.test_drafts import KINDS, LyingDrafter, requests
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same, told
from tests.model.kernels.gpu import DEVICE
from tests.model.weights.gguf_writer import write_gguf
from tests.model.weights.quantized_layouts import CASES, quantize
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import EngineFailed, InvalidConfig
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.parallel.devices.runner import WatchedEvent
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.sharding.shard import Shard
from tokenmill.model.weights.hub import fetch
from tokenmill.startup.assembly.rank_process import device_of_rank
from tokenmill.startup.assembly.setup import BuiltEngine, build_engine

pytestmark = [
    pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here"),
    pytest.mark.skipif(DEVICE != "cpu", reason="interpreted"),
]

SEED = seed_for(__name__)
# Few pages and rows, so that requests wait and are preempted.
SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 24, "num_pages": 16, "page_size": 4}
SMALL |= {"max_model_len": 48, "dtype": "float32", "kernels": "torch", "num_threads": 1, "device": "cpu"}


@contextlib.contextmanager
def ranks(
    config: EngineConfig, folder: Path, **shares: int
) -> Iterator[tuple[Engine, RankPlatform, list[subprocess.Popen[str]]]]:
    """Rank 0's engine in this process, and the other ranks in others; two that share each layer by default."""
    shares = shares or {"tensor_parallel_size": 2}
    with built_ranks(dataclasses.replace(config, **shares), folder) as (built, platform, peers):
        yield built.engine, platform, peers


@contextlib.contextmanager
def built_ranks(
    config: EngineConfig, folder: Path
) -> Iterator[tuple[BuiltEngine, RankPlatform, list[subprocess.Popen[str]]]]:
    """The engine of a config of several ranks: rank 0's part in this process, and the other ranks in others."""
    config = dataclasses.replace(config, rendezvous=str(folder / "ranks"), rank_timeout=120.0)
    platform, peers = RankPlatform(), list[subprocess.Popen[str]]()
    for rank in range(1, config.num_ranks):
        path = folder / f"rank-{rank}.json"
        path.write_bytes(msgspec.json.encode(dataclasses.replace(config, rank=rank)))
        command = ["-m", "tests.engine.parallel.devices.peer", str(path), str(calls_of(folder, rank))]
        peers.append(subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True))
    try:
        built = build_engine(config, platform=platform)
        try:
            yield built, platform, peers
        finally:
            built.engine.close()
    finally:
        is_aborted = any(channel.is_aborted for channel in platform.channels.values())
        for peer in peers:
            if peer.poll() is None and is_aborted:
                peer.kill()
            peer.wait(60)


def calls_of(folder: Path, rank: int) -> Path:
    """The file in which a rank writes its calls at its end."""
    return folder / f"calls-{rank}.json"


def read_calls(folder: Path, rank: int) -> dict[str, list[Call]]:
    """The calls of a rank that has ended."""
    return msgspec.json.decode(calls_of(folder, rank).read_bytes(), type=dict[str, list[Call]])


def tell(config: EngineConfig, wanted: list[AddRequest]) -> list[Any]:
    """Return the record of one device."""
    engine = build_engine(config, platform=RankPlatform()).engine
    try:
        outputs = run(engine, wanted)
        return [told(outputs[request.id]) for request in wanted]
    finally:
        engine.close()


SMALLEST = {"num_key_value_heads": 1, "tie_word_embeddings": True, "num_hidden_layers": 1}
# Family, its shape, kinds of requests, options: what ranks do in steps must be the same of all, whatever is asked.
FEATURES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    # Log probabilities, penalties, reports on prompts, a grammar; more requests than rows.
    "graphs": ("qwen3", SMALLEST, (1, 4, 5, 10), {}),
    "experts, eager": ("qwen3_moe", {"attention_bias": True}, (0, 6), {"enforce_eager": True}),
    "windows": ("gemma3", {}, (0, 3, 9), {}),
    "sinks": ("gpt_oss", {}, (1, 6), {}),
    "squares": ("arcee", {}, (2, 7), {}),
    "no prefix cache": ("llama", {}, (1, 11), {"enable_prefix_caching": False}),
    "priority": ("qwen2", {}, (0, 5), {"scheduling_policy": "priority"}),
    "drafts of suffixes": ("qwen3", {}, (0, 3), {"speculative_config": "suffix"}),
    "steps one by one": ("granite", {}, (4, 10), {"async_scheduling": False}),
    "int4": ("qwen3", {"intermediate_size": 64}, (0, 3), {}),
    "blocks": ("phi3", {"hidden_size": 64, "intermediate_size": 96}, (1, 5), {}),
    "sums in one shot": ("qwen3", SMALLEST, (1, 4, 10), {"all_reduce": "one-shot"}),
    "invariant": ("qwen3", SMALLEST, (0, 3), {"all_reduce": "one-shot", "batch_invariant": True, "kernels": "triton"}),
    "every kind": ("phi3", SMALLEST, tuple(kind for kind in range(len(KINDS)) if "min_tokens" not in KINDS[kind]), {}),
}
# Forms of checkpoints: words of GPTQ, and of a GGUF file blocks, within which a rank's columns end.
STORED = {"int4": "gptq 4", "blocks": "Q8_0"}


def stored(model: Path, family: str, form: str | None) -> Path:
    """The checkpoint in a form that is quantized."""
    if form in CASES:
        quantize(model, *CASES[form], np.random.default_rng(SEED))
    elif form is not None:
        return fetch(str(write_gguf(model, family, form)), None, str(model.parent / "cache"))
    return model


@pytest.mark.parametrize("feature", FEATURES)
def test_two_devices_tell_what_one_does(feature: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    family, shape, kinds, options = FEATURES[feature]
    rng, folder = random.Random(SEED), make_checkpoint(tmp_path / "model", family, seed=SEED, **shape)
    folder = stored(folder, family, STORED.get(feature))
    config = EngineConfig(model=str(folder), **{**SMALL, **options}).resolve()
    wanted = requests(rng, [KINDS[kind] for kind in kinds], 6)
    alone = tell(config, wanted)
    with ranks(config, tmp_path) as (engine, platform, _):
        outputs = run(engine, wanted)
        assert_same(alone, [told(outputs[request.id]) for request in wanted], is_exact=False)
        if feature == "graphs":
            assert platform.replays > 0, "decodes run in graphs"
        drafted = drafts_of(engine, wanted, outputs, rng)
        assert_same(alone, [told(drafted[request.id]) for request in wanted], is_exact=False)
    own = platform.calls
    assert read_calls(tmp_path, 1) == own, "all ranks make the same calls in the same order"
    sums = {"sum"} if config.all_reduce == "nccl" else set()  # the library makes none but large ones
    assert {name for name, _, _ in own["ranks.devices-0"]} == {"gather", "share"} | sums


def drafts_of(
    engine: Engine, wanted: list[AddRequest], outputs: dict[str, list[TokenOutput]], rng: random.Random
) -> dict[str, list[TokenOutput]]:
    """The same requests again, with drafts of which some are right."""
    known = {name: told(own)[0][0] for name, own in outputs.items()}
    engine.scheduler.state.drafters = (LyingDrafter(known, rng),)
    return run(engine, wanted)


def test_memory_is_measured_together(tmp_path: Path) -> None:
    check_measured_memory(tmp_path, 1)


def check_measured_memory(folder: Path, num_layers: int, **shares: int) -> None:
    """Ranks agree on how many pages their memory has room for, and run."""
    model = make_checkpoint(folder / "model", "qwen3", num_hidden_layers=num_layers)
    config = EngineConfig(model=str(model), **{**SMALL, "num_pages": None})
    with ranks(config.resolve(), folder, **shares) as (engine, _, _):
        (output,) = run(engine, requests(random.Random(SEED), [{"temperature": 0.0}], 4))["0"][-1:]
        assert output.finish_reason


def test_a_rank_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    check_killed_rank(tmp_path, 1)


def check_killed_rank(folder: Path, num_layers: int, **shares: int) -> None:
    """A rank of two that is killed while steps run ends the engine."""
    model = make_checkpoint(folder / "model", "qwen3", num_hidden_layers=num_layers)
    config = EngineConfig(model=str(model), **SMALL).resolve()
    with ranks(config, folder, **shares) as (engine, platform, (peer,)):
        for request in requests(random.Random(SEED), [{"temperature": 0.0}] * 3, 12):
            engine.add(request)
        engine.step()
        peer.kill()
        with pytest.raises(EngineFailed):
            step_until_done(engine)
        platform.abort()


def step_until_done(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


class _Never:
    def is_past(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("it would wait for ever")


class _Late:
    """Memory of ranks one of which is late from the third look on."""

    num_looks = 0

    def look(self, since: float) -> None:
        self.num_looks += 1
        if self.num_looks == 3:
            raise EngineFailed("another rank has not come in time")


def test_whoever_waits_for_a_device_looks_after_the_other_ranks() -> None:
    class Silent:
        is_aborted = False

        def abort(self) -> None:
            self.is_aborted = True

    memory, communicator = _Late(), CountingCommunicator(Silent())  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="in time"):
        WatchedEvent(_Never(), memory, communicator).wait()  # type: ignore[arg-type]
    assert memory.num_looks == 3
    assert communicator.is_aborted, "else the device waits for ever"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pipeline_parallel_size": 2, "nnodes": 2, "master_secret": "secret"}, "--nnodes is for CPUs"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "--enable-expert-parallel is for CPUs"),
        ({"tensor_parallel_size": 2, "batch_invariant": True}, "needs --all-reduce one-shot"),
    ],
)
def test_what_devices_do_not_share_is_refused(options: dict[str, Any], sentence: str) -> None:
    from tokenmill.startup.machine.device import check

    config = EngineConfig(device="cpu", dtype="float32", **options).resolve()
    with pytest.raises(InvalidConfig, match=sentence):
        check(config, RankPlatform())


def test_each_rank_has_a_device() -> None:
    def device(named: str, rank: int) -> str:
        return device_of_rank(EngineConfig(device=named, tensor_parallel_size=4, rank=rank))

    assert [device("cuda", rank) for rank in (0, 3)] == ["cuda:0", "cuda:3"]
    assert device("cuda:4", 3) == "cuda:7"
    assert device("auto", 1) == "auto:1"
    assert device("cpu", 1) == "cpu"


def test_a_shard_says_how_pairs_of_matrices_are_cut() -> None:
    for sums, (inputs, outputs) in {True: (24, 64), False: (48, 32)}.items():
        shard = Shard(1, 2, sums=sums)
        parts = shard.second(shard.part(48), 64)
        assert [part.count for part in parts] == [inputs, outputs]
