"""FlashInfer's page lists, what is planned before a graph is replayed, and that none of it waits for the device."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakeGraph, FakePlatform, FakeStream
from tests.engine.runner.test_not_numbers import running
from tests.model.attention.test_paged import StandInWrapper, attention_over_pages
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.attention.backend import AttentionConfig
from tokenmill.model.attention.backends.flashinfer import FlashInferAttention, FlashInferGraphs
from tokenmill.model.attention.batch import DeviceLens
from tokenmill.model.attention.paged import Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.attention.registry import choose_attention
from tokenmill.platform.protocol import Tensors

SEED = seed_for(__name__)


class OneDevice(TorchDispatchMode):
    """Every operation has all that it reads and makes on one device; counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, torch.Tensor)]
        assert len({tensor.device for tensor in tensors}) <= 1, f"{func} goes from one device to another"
        self.count += 1
        return made


def planned(
    contexts: np.ndarray, table: torch.Tensor, page_size: int, window: int | None = None
) -> tuple[torch.Tensor, ...]:
    attention = FlashInferAttention(AttentionSpec(1, 2, 1, 8), page_size, "float16", str(table.device), None)
    count = len(contexts)
    # Made on the device: a copy of the host's would be what must not happen.
    lens = DeviceLens(
        torch.tensor(contexts, device=table.device), torch.arange(count + 1, dtype=torch.int32, device=table.device)
    )
    requests = Requests(slice(0, count), table, lens, np.ones(count, dtype=np.int32), contexts)
    with OneDevice() as watch:
        lists = attention.lists(requests, window)
    assert watch.count > 0
    return lists


def test_pages_are_those_of_the_table_request_by_request(rng: np.random.Generator) -> None:
    page_size = int(rng.choice([1, 4, 16]))
    contexts = rng.integers(1, 70, int(rng.integers(1, 9))).astype(np.int32)
    counts = -(-contexts // page_size)
    table = torch.from_numpy(rng.integers(0, 1000, (len(contexts), int(counts.max()) + 3)).astype(np.int32))
    starts, bounds, pages, last = planned(contexts, table, page_size)
    assert starts.tolist() == list(range(len(contexts) + 1))
    assert bounds.tolist() == [0, *np.cumsum(counts)]
    assert pages.tolist() == [int(page) for row, count in zip(table, counts, strict=True) for page in row[:count]]
    assert last.tolist() == [(context - 1) % page_size + 1 for context in contexts]


def test_a_plan_neither_reads_from_the_device_nor_copies_to_it(rng: np.random.Generator) -> None:
    """A tensor without memory cannot be read, as one whose memory is elsewhere should not be."""
    contexts = rng.integers(1, 70, 5).astype(np.int32)
    for window, first in ((None, np.zeros_like(contexts)), (9, np.maximum(contexts - 9, 0) // 4)):
        pages = planned(contexts, torch.empty(5, 20, dtype=torch.int32, device="meta"), 4, window)[2]
        assert pages.shape == (int((-(-contexts // 4) - first).sum()),)
        assert pages.device.type == "meta"


class DecodeWrapper:
    """`BatchDecodeWithPagedKVCacheWrapper` for graphs: what it runs by is in the buffers, and there it stays.

    Attributes:
        made: all wrappers of a test. events: what was done with them, in order.
    """

    made: list[DecodeWrapper]
    events: list[tuple[str, int]]

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert (layout, options["use_cuda_graph"]) == ("NHD", True)
        self.workspace, self.use_tensor_cores = workspace, options["use_tensor_cores"]
        self.bounds, self.pages, self.last = (
            options[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
        )
        assert len(self.bounds) == len(self.last) + 1
        self.planned = -1
        self.made.append(self)

    def plan(self, bounds, pages, last, heads, kv_heads, head_dim, page_size, **options) -> None:
        assert len(bounds) == len(self.bounds), "the size of a graph"
        self.events.append(("plan", len(last)))
        self.bounds.copy_(bounds)
        self.last.copy_(last)
        self.pages[: len(pages)].copy_(pages)
        self.page_size, self.options, self.planned = page_size, options, int(bounds[-1])

    def run(self, q, memory, out) -> None:
        assert self.planned == int(self.bounds[-1]), "planned for what the buffers hold"
        self.events.append(("run", len(q)))
        counts = (self.bounds[1:] - self.bounds[:-1]).tolist()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for row, part in enumerate(self.pages[: sum(counts)].split(counts)):
            table[row, : len(part)] = part
        lens = (self.bounds[1:] - self.bounds[:-1] - 1) * self.page_size + self.last
        left, starts = self.options["window_left"], torch.arange(len(q) + 1)
        window = None if left == -1 else left + 1
        out.copy_(attention_over_pages(q, memory, table, starts, lens, window, self.options["sm_scale"]))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tokenmill.model.attention.backends.flashinfer.WORKSPACE_BYTES", 64)
    DecodeWrapper.made, DecodeWrapper.events = [], []
    return types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper, BatchPrefillWithPagedKVCacheWrapper=StandInWrapper
    )


def test_a_graph_lists_its_pages_and_is_planned_for_its_lengths(rng: np.random.Generator, library: Any) -> None:
    page_size, group = int(rng.choice([1, 4, 16])), int(rng.choice([1, 3, 5]))
    spec = AttentionSpec(1, 2 * group, 2, 8)
    graphs = FlashInferGraphs(spec, page_size, "float32", "cpu", library)
    layers = [AttentionLayer(0, 0.3), AttentionLayer(1, 0.3, 5)]
    memory = torch.randn(2, 200, page_size, 2, 8)
    width = -(-70 // page_size)
    for is_first, rows in ((True, 6), (True, 2), (False, 6), (False, 2), (False, 6)):
        lens = rng.integers(1, 70, rows).astype(np.int32)
        table = torch.from_numpy(rng.integers(0, 200, (rows, width)).astype(np.int32))
        if not is_first:
            assert graphs.before_replay(lens)
        # The run before a capture knows no lengths: the library plans for those of padding.
        lens = np.ones_like(lens) if is_first else lens
        own = DeviceLens(torch.from_numpy(lens), torch.arange(rows + 1, dtype=torch.int32))
        plan = graphs.plan(Requests(slice(0, rows), table, own, np.ones(rows, dtype=np.int32), lens))
        for layer in layers:
            q = torch.randn(rows, 2 * group, 8)
            got = torch.full_like(q, torch.nan)
            graphs.attend(q, (memory[0], memory[1]), got, plan, layer)
            want = attention_over_pages(q, memory, table, torch.arange(rows + 1), own.context_lens, layer.window, 0.3)
            torch.testing.assert_close(got, want)
    assert len(DecodeWrapper.made) == 4, "one for each size and window"
    for name, count in {"bounds": 2, "pages": 2, "last": 1, "workspace": 1}.items():
        assert len({getattr(one, name).data_ptr() for one in DecodeWrapper.made}) == count, f"{name} are shared"
    assert all(one.use_tensor_cores == (group >= 4) for one in DecodeWrapper.made)


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_lies_behind_a_window_is_not_read(rng: np.random.Generator, library: Any, is_captured: bool) -> None:
    page_size, window, rows = int(rng.choice([1, 4, 16])), int(rng.integers(1, 40)), 3
    spec, layer = AttentionSpec(1, 4, 2, 8, is_windowed=True), AttentionLayer(0, 0.3, window)
    attention: Any = (FlashInferGraphs if is_captured else FlashInferAttention)(
        spec, page_size, "float32", "cpu", library
    )
    contexts = rng.integers(60, 99, rows).astype(np.int32)
    counts = np.ones_like(contexts) if is_captured else rng.integers(1, 30, rows).astype(np.int32)
    table = torch.from_numpy(rng.permutation(rows * -(-99 // page_size)).astype(np.int32)).view(rows, -1)
    memory, starts = torch.randn(2, table.numel(), page_size, 2, 8), np.concatenate([[0], np.cumsum(counts)])
    q = torch.randn(int(starts[-1]), 4, 8)
    lens = DeviceLens(torch.from_numpy(contexts), torch.from_numpy(starts.astype(np.int32)))
    requests = Requests(slice(0, len(q)), table, lens, counts, contexts)
    want = attention_over_pages(q, memory, table, lens.query_starts, lens.context_lens, window, 0.3)
    if is_captured:
        attention.attend(q, memory, torch.empty_like(q), attention.plan(requests), layer)
        attention.before_replay(contexts)
    for pages, context, count in zip(table, contexts, counts, strict=True):
        memory[:, pages[: max(0, context - count - window + 1) // page_size].long()] = torch.nan
    assert memory.isnan().any()
    got = torch.empty_like(q)
    attention.attend(q, memory, got, attention.plan(requests), layer)
    torch.testing.assert_close(got, want)


def test_a_library_that_reads_behind_windows_is_refused(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    config = AttentionConfig(AttentionSpec(1, 4, 2, 16, is_windowed=True), 16, "bfloat16", FakePlatform())
    assert choose_attention("flashinfer", config).name == "flashinfer"
    monkeypatch.setattr(FlashInferAttention, "_first_pages", lambda self, lens, *others: lens * 0)
    with pytest.raises(InvalidConfig, match="FlashInfer is wrong over pages of 16 tokens here"):
        choose_attention("flashinfer", config)


class CapturingPlatform(FakePlatform):
    """Runs work once before it captures it, and says when what runs is a graph."""

    is_in_graph = False

    def _noted(self, work: Callable[[], Tensors]) -> Tensors:
        self.is_in_graph = True
        try:
            return work()
        finally:
            self.is_in_graph = False

    def capture(self, work: Callable[[], Tensors], stream: FakeStream) -> FakeGraph:
        work()
        return super().capture(lambda: self._noted(work), stream)


@pytest.mark.skipif(DEVICE != "cpu", reason="what stands in for a device is a CPU")
@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_plans_before_each_replay_and_never_inside_a_graph(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    print(f"seed {SEED}")
    generator, platform, replays, copies = random.Random(SEED), CapturingPlatform(), [], []
    monkeypatch.setitem(sys.modules, "flashinfer", library)

    def plan(*args: Any, original: Any = DecodeWrapper.plan, **options: Any) -> None:
        assert not platform.is_in_graph, "a graph cannot hold what the host does"
        original(*args, **options)

    def replay(graph: Any, original: Any = FakeGraph.replay) -> None:
        rows = len(graph.outputs[0])
        assert DecodeWrapper.events[-1] == ("plan", rows), "nothing is issued between a plan and its replay"
        # A plan is copied out of one memory: what was copied before has arrived when the next one is made.
        assert set(copies) <= set(platform.host_waits)
        copies.append(platform.events[-1])
        replays.append(rows)
        original(graph)

    monkeypatch.setattr(DecodeWrapper, "plan", plan)
    monkeypatch.setattr(FakeGraph, "replay", replay)
    model = make_checkpoint(tmp_path, "qwen3", seed=SEED, num_hidden_layers=2)
    prompts = [[generator.randrange(250) for _ in range(length)] for length in (1, 5, 22)]
    found = []
    options = {"max_num_seqs": 4, "dtype": "float32", "kernels": "torch", "async_scheduling": is_async}
    for given, name in ((None, "auto"), (platform, "flashinfer")):
        with running(model, given, attention_backend=name, **options) as engine:
            outputs: dict[str, list[int]] = {}
            for number, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0.0, max_tokens=4 + number, ignore_eos=True)
                engine.add(AddRequest(id=str(number), prompt_token_ids=prompt, params=params))
            while engine.has_work:
                for output in engine.step():
                    outputs.setdefault(output.id, []).extend(output.token_ids)
        found.append(outputs)
    assert found[0] == found[1]
    assert set(replays) >= {1, 2, 4}, "the sizes of steps with one, two and three decodes"
