"""Check the steps before serving: on a device one as full as any, so that a lack of memory shows at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.model.kernels.gpu import DEVICE
from tokenmill.config.configs import EngineConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import OutOfMemory
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.models.decoder import Decoder
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.startup.assembly.setup import build_engine

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="what stands in for a device is a CPU")

Passes = list[tuple[list[int], int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("m"), "qwen3", vocab_size=277, num_hidden_layers=1)


def passes_of(model: Path, platform: CpuPlatform, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Passes:
    """Tokens of each request, and the number of outputs, of the passes that a start runs eagerly."""
    found: Passes = []

    def forward(decoder: Decoder, batch: ForwardBatch, attention: Any, hidden: Any = None) -> torch.Tensor:
        found.append((batch.query_lens.tolist(), len(batch.output_indices)))
        return original(decoder, batch, attention, hidden)

    original = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", forward)
    build(model, platform, **options)
    return found


def build(model: Path, platform: CpuPlatform, **options: Any) -> EngineReady:
    """Start an engine, and end it."""
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 16, "page_size": 4, "num_pages": 60}
    config = EngineConfig(
        model=str(model), num_threads=1, device="cpu", dtype="float32", kernels="torch", **{**sizes, **options}
    )
    built = build_engine(config.resolve(), platform=platform)
    built.engine.close()
    return built.ready


def test_a_device_runs_a_mixed_step_of_the_whole_budget(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = passes_of(model, FakePlatform(), monkeypatch, enforce_eager=True)
    # Three decodes, then prompts that share what they leave: 14 is the longest, and each has a token.
    assert ([1, 1, 1, 14, 6, 1], 6) in passes


@pytest.mark.parametrize(
    ("options", "fullest"),
    [
        ({"max_num_seqs": 1}, [14]),
        ({"num_pages": 5, "max_num_seqs": 3}, None),
        ({"max_model_len": 2, "max_num_batched_tokens": 6}, [1, 1, 1]),
        ({"batch_policy": "prefill-first"}, [14, 6, 1]),
        ({"enable_chunked_prefill": False}, [1, 1, 1, 14, 6, 1]),
    ],
)
def test_so_it_does_with_what_the_flags_leave(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fullest: list[int] | None
) -> None:
    passes = passes_of(model, FakePlatform(), monkeypatch, enforce_eager=True, **options)
    assert passes, "a small pool runs what it can"
    assert fullest is None or fullest in [lens for lens, _ in passes]


class CountedPlatform(FakePlatform):
    """So much is free, and at the peak of what has run since somebody asked, so much less.

    Attributes:
        peak: what steps take, KV among it.
    """

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free, self.peak = free, 0

    def available_bytes(self) -> int:
        self.peak = 0
        return self.free

    def untouched_bytes(self) -> int:
        return self.free - self.peak


@pytest.mark.parametrize("is_eager", [False, True])
def test_the_kv_cache_is_sized_by_what_a_full_step_was_seen_to_leave(
    model: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, is_eager: bool
) -> None:
    page_bytes = build(model, FakePlatform(), enforce_eager=True).kv_bytes // 61
    free = 1 << 20
    taken = free - page_bytes * int(rng.integers(12, 28)) + 7
    platform, caches, fullest = CountedPlatform(free), [], []
    # A step of the whole budget; half of the rows are decodes, in the graph where there is one.
    num_eager = 24 if is_eager else 21

    def forward(decoder: Decoder, batch: ForwardBatch, attention: Any, hidden: Any = None) -> torch.Tensor:
        if attention.kv not in caches:
            caches.append(attention.kv)
        if len(batch.token_ids) == num_eager and len(caches) == 1:
            platform.peak = taken + attention.kv.num_bytes
            fullest.append((batch.query_lens.tolist(), len(platform.captured)))
        return original(decoder, batch, attention, hidden)

    original = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", forward)
    sizes = {"num_pages": None, "max_num_seqs": 6, "gpu_memory_utilization": 0.8}
    ready = build(model, platform, enforce_eager=is_eager, **sizes)
    trial, final = caches
    assert trial.num_pages == 1 + 24 // 4 + 2 * 6, "just holds the step"
    assert ready.num_pages == final.num_pages - 1 == int((free - taken) * 0.8) // page_bytes - 1
    assert fullest == [([1, 1, 1, 14, 6, 1][-6 if is_eager else -3 :], 0 if is_eager else 1)]


def test_a_kv_cache_whose_size_is_asked_for_needs_no_measuring(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ({"num_pages": 40}, {"num_pages": None, "kv_cache_memory_bytes": 1 << 20}):
        platform = CountedPlatform(1 << 30)
        monkeypatch.setattr(platform, "untouched_bytes", None)
        build(model, platform, enforce_eager=True, **size)


def test_a_cpu_runs_one_small_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes_of(model, CpuPlatform(), monkeypatch) == [([8], 1), ([1], 1)]


def test_a_device_without_memory_for_its_largest_step_says_what_to_lower(
    model: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    most = int(rng.integers(2, 24))

    def forward(decoder: Decoder, batch: ForwardBatch, attention: Any, hidden: Any = None) -> torch.Tensor:
        if len(batch.token_ids) > most:
            raise MemoryError
        return original(decoder, batch, attention, hidden)

    original = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", forward)
    with pytest.raises(OutOfMemory, match=r"a step of 24 tokens: lower --max-num-batched-tokens.*--gpu-memory"):
        build(model, FakePlatform(), enforce_eager=True)


def test_an_error_of_the_first_steps_is_that_of_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> torch.Tensor:
        raise ValueError("a bug")

    monkeypatch.setattr(Decoder, "forward", forward)
    for platform in (FakePlatform(), CpuPlatform()):
        with pytest.raises(ValueError, match="a bug"):
            build(model, platform, enforce_eager=platform.is_accelerator)
