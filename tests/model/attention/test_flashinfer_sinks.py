"""Sinks through FlashInfer: its wrapper for them, each layer's numbers, and a library that is wrong is not taken."""

from __future__ import annotations

import math
import random
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_on_device import GREEDY, LAYER_TYPES, run, running, tokens
from tests.model.attention.test_flashinfer import CapturingPlatform, DecodeWrapper
from tests.model.attention.test_paged import StandInWrapper, attention_over_pages
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.attention.backend import AttentionConfig
from tokenmill.model.attention.backends.flashinfer import SINK_WRAPPER, FlashInferAttention, FlashInferGraphs
from tokenmill.model.attention.batch import DeviceLens
from tokenmill.model.attention.paged import Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.attention.registry import choose_attention

SEED = seed_for(__name__)
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="what stands in for the library is for CPUs")


class SinkWrapper:
    """`BatchAttentionWithAttentionSinkWrapper`, for prompts and in graphs: made for a window, it takes no other.

    Attributes:
        runs: whether each run was of a graph, and its sinks.
        is_in_graph: says whether what runs is captured.
    """

    runs: list[tuple[bool, torch.Tensor]]
    is_in_graph = staticmethod(lambda: False)

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str = "auto", **options: Any) -> None:
        assert layout == "NHD"
        assert options["head_dim_qk"] == options["head_dim_vo"]
        self.window_left, self.dtype = options["window_left"], options["q_data_type"]
        self.is_graph = options.get("use_cuda_graph", False)
        assert backend == ("fa2" if self.is_graph else "auto")
        if self.is_graph:
            names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
            self.lists = [options[f"{name}_buf"] for name in names]
            assert len(self.lists[0]) == len(self.lists[1]) == len(self.lists[3]) + 1

    def plan(self, starts, bounds, pages, last, heads, kv_heads, head_dim, page_size, **options) -> None:
        assert not self.is_in_graph(), "a graph cannot hold what the host does"
        assert options["causal"]
        assert options["window_left"] == self.window_left
        assert options["q_data_type"] == options["kv_data_type"] == self.dtype
        self.page_size = page_size
        if self.is_graph:
            for own, given in zip(self.lists, (starts, bounds, pages, last), strict=True):
                assert own is self.lists[2] or len(own) == len(given), "the size of a graph"
                own[: len(given)].copy_(given)
        else:
            self.lists = [starts, bounds, pages, last]

    def run(self, q, memory, sinks, scale, out) -> None:
        assert sinks.dtype == torch.float32
        assert sinks.shape == q.shape[1:2]
        self.runs.append((self.is_in_graph(), sinks.clone()))
        starts, bounds, pages, last = self.lists
        counts = (bounds[1:] - bounds[:-1]).tolist()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for row, part in enumerate(pages[: sum(counts)].split(counts)):
            table[row, : len(part)] = part
        lens = (bounds[1:] - bounds[:-1] - 1) * self.page_size + last
        window = None if self.window_left == -1 else self.window_left + 1
        out.copy_(attention_over_pages(q, memory, table, starts, lens, window, scale, sinks))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tokenmill.model.attention.backends.flashinfer.WORKSPACE_BYTES", 64)
    DecodeWrapper.made, DecodeWrapper.events, SinkWrapper.runs = [], [], []
    made = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
        BatchPrefillWithPagedKVCacheWrapper=StandInWrapper,
        BatchAttentionWithAttentionSinkWrapper=SinkWrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    return made


@pytest.mark.parametrize("is_captured", [False, True])
def test_each_layer_has_its_own_sinks(rng: np.random.Generator, library: Any, is_captured: bool) -> None:
    """With and without windows, beside layers that have none."""
    page_size, group, rows = int(rng.choice([1, 4, 16])), int(rng.choice([1, 3, 4])), int(rng.integers(1, 5))
    spec = AttentionSpec(5, 2 * group, 2, 8, has_sinks=True)
    made = FlashInferGraphs if is_captured else FlashInferAttention
    attention = made(spec, page_size, "float32", "cpu", library)
    sinks = [None if layer == 2 else torch.randn(2 * group) * 3 for layer in range(5)]
    layers = [AttentionLayer(index, 0.3, (None, 5)[index % 2], sinks=own) for index, own in enumerate(sinks)]
    memory = torch.randn(2, 200, page_size, 2, 8)
    for number in range(3):
        contexts = rng.integers(1, 70, rows).astype(np.int32)
        lens = np.ones_like(contexts) if is_captured else np.minimum(rng.integers(1, 9, rows), contexts)
        table = torch.from_numpy(rng.integers(0, 200, (rows, -(-70 // page_size))).astype(np.int32))
        if is_captured and number == 0:
            contexts = np.ones_like(contexts)  # the run before a capture knows no lengths
        elif is_captured:
            assert attention.before_replay(contexts)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
        own = DeviceLens(torch.from_numpy(contexts), starts)
        count = int(starts[-1])
        plan = attention.plan(Requests(slice(0, count), table, own, lens.astype(np.int32), contexts))
        for layer in layers:
            q = torch.randn(count, 2 * group, 8)
            got = torch.full_like(q, torch.nan)
            attention.attend(q, (memory[0], memory[1]), got, plan, layer)
            parts = (table, starts, own.context_lens, layer.window, 0.3, layer.sinks)
            torch.testing.assert_close(got, attention_over_pages(q, memory, *parts))
    wanted = [own for own in sinks if own is not None] * 3
    assert all(torch.equal(got, want) for (_, got), want in zip(SinkWrapper.runs, wanted, strict=True))


def chosen(page_size: int = 16, name: str = "flashinfer", **shape: Any) -> str:
    spec = msgspec.structs.replace(AttentionSpec(2, 8, 2, 16, has_sinks=True), **shape)
    return choose_attention(name, AttentionConfig(spec, page_size, "bfloat16", FakePlatform())).name


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_a_library_that_has_them_is_taken(page_size: int, library: Any) -> None:
    for shape in ({}, {"num_heads": 2, "num_kv_heads": 1}, {"has_sinks": False}, {"is_windowed": True}):
        assert chosen(page_size, **shape) == chosen(page_size, "auto", **shape) == "flashinfer"


class Deaf(SinkWrapper):
    def run(self, q, memory, sinks, scale, out) -> None:
        super().run(q, memory, torch.full_like(sinks, -torch.inf), scale, out)


class Binary(SinkWrapper):
    def run(self, q, memory, sinks, scale, out) -> None:
        super().run(q, memory, sinks * math.log(2), scale, out)


class Scaled(SinkWrapper):
    def run(self, q, memory, sinks, scale, out) -> None:
        super().run(q, memory, sinks * scale, scale, out)


class Shifted(SinkWrapper):
    def run(self, q, memory, sinks, scale, out) -> None:
        super().run(q, memory, sinks.roll(1), scale, out)


class WrongInGraphs(SinkWrapper):
    def run(self, q, memory, sinks, scale, out) -> None:
        super().run(q, memory, sinks - int(self.is_graph), scale, out)


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("wrong", [Deaf, Binary, Scaled, Shifted, WrongInGraphs])
def test_a_library_that_is_wrong_is_refused(wrong: type[SinkWrapper], page_size: int, library: Any) -> None:
    setattr(library, SINK_WRAPPER, wrong)
    with pytest.raises(InvalidConfig, match=f"FlashInfer is wrong over pages of {page_size} tokens with sinks here"):
        chosen(page_size)
    assert chosen(page_size, "auto") == "triton"
    assert chosen(page_size, "auto", has_sinks=False) == "flashinfer", "no other model is concerned"


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("Ninja has failed. Log:"), "Ninja has failed"), (AssertionError(), "Assertion")]
)
def test_a_library_that_cannot_is_quoted(error: Exception, reason: str, library: Any) -> None:
    def make(*given: Any, **options: Any) -> None:
        raise error

    setattr(library, SINK_WRAPPER, make)
    with pytest.raises(InvalidConfig, match=f"FlashInfer refuses pages of 16 tokens here: {reason}"):
        chosen()
    delattr(library, SINK_WRAPPER)
    with pytest.raises(InvalidConfig, match=f"this FlashInfer has no {SINK_WRAPPER}"):
        chosen()
    assert chosen(name="auto") == "triton"


@pytest.mark.parametrize("keeps_pages", [True, False])
def test_an_engine_tells_what_it_does_without_the_library(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch, keeps_pages: bool
) -> None:
    """With few pages, so that those behind windows are others' while the request runs, unless they are kept."""
    print(f"seed {SEED}")
    generator, platform, found = random.Random(SEED), CapturingPlatform(), []
    monkeypatch.setattr(SinkWrapper, "is_in_graph", staticmethod(lambda: platform.is_in_graph))
    shape = {"num_hidden_layers": 2, "layer_types": LAYER_TYPES, "sliding_window": 9}
    model = make_checkpoint(tmp_path, "gpt_oss", seed=SEED, **shape)
    prompts = [[generator.randrange(250) for _ in range(length)] for length in (1, 5, 20)]
    for given, name in ((None, "auto"), (platform, "flashinfer")):
        options = {"attention_backend": name, "disable_hybrid_kv_cache_manager": keeps_pages, "num_pages": 24}
        with running(model, given, **options) as engine:
            SinkWrapper.runs.clear()
            assert (engine.stats().num_window_pages == 0) == keeps_pages
            found.append(tokens(run(engine, prompts, [GREEDY] * 3)))
    assert found[0] == found[1]
    assert {is_captured for is_captured, _ in SinkWrapper.runs} == {False, True}
    assert len({tuple(own.tolist()) for _, own in SinkWrapper.runs}) == 2, "of two layers"
