"""Contexts over several devices, each with a part of the pages: the bits of one device, in decodes and prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE
from tests.paging import Chunks, PagedRequests, attention_layers
from tests.tiers import scaled
from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.model.attention.backend import AttentionConfig
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.context_rows import ContextRows
from tokenmill.model.attention.context_step import ContextDevices, num_own_pages, own_pages
from tokenmill.model.attention.paged import PagedAttention
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.attention.registry import choose_attention
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.model.kernels.triton.splits import SPLIT_KEYS
from tokenmill.platform.cpu import CpuPlatform

PAGE = SPLIT_KEYS
SECONDS = 120.0
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="ranks are threads with one device; interpreted")


class Gpu(CpuPlatform):
    """A GPU of the imagination."""

    is_accelerator = True

    def num_units(self) -> int:
        return 4


class Turns:
    """Ranks as threads of which one runs at a time, as the interpreter wants it; they meet where they gather."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Lock()
        self._meeting = threading.Barrier(size)
        self._parts: list[Any] = [None] * size

    def gather(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.gather`."""
        self._parts[rank] = own.clone()
        self._turn.release()
        try:
            self._meeting.wait(SECONDS)
            every = torch.stack(self._parts)
            self._meeting.wait(SECONDS)
        finally:
            self._turn.acquire()
        return every

    def run(self, work: Callable[[int], None]) -> None:
        """Run the work of every rank, and raise what one has raised."""
        failures: list[BaseException] = []

        def guarded(rank: int) -> None:
            with self._turn:
                try:
                    with torch.inference_mode():
                        work(rank)
                except BaseException as error:
                    failures.append(error)
                    self._meeting.abort()

        threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        for failure in failures:
            if not isinstance(failure, threading.BrokenBarrierError):
                raise failure
        assert not failures


def attention(spec: AttentionSpec, num_pages: int, devices: ContextDevices | None) -> PagedAttention:
    config = AttentionConfig(spec, PAGE, "float32", Gpu(), devices=devices)
    made = choose_attention("triton", config).make(num_pages)
    assert isinstance(made, PagedAttention)
    return made


def plan_of(requests: PagedRequests, chunks: Chunks, known: int) -> StepPlan:
    """The plan of a step that has just been made a batch of; request i has row i, and its pages from `known` on."""
    rows, counts = (np.array(column, dtype=np.int32) for column in zip(*chunks, strict=True))
    computed = np.array([requests.computed[row] for row in rows], dtype=np.int32) - counts
    pages = [requests.pages[row][known:] for row in rows]
    numbers = np.concatenate([np.arange(known, known + len(own)) for own in pages]).astype(np.int32)
    page_rows = np.repeat(rows, [len(own) for own in pages])
    entries = page_rows, numbers, np.concatenate(pages).astype(np.int32)
    return StepPlan(0, tuple[AdmittedRequest, ...](), (), rows, computed, counts, 0 * counts, *entries)


class Rank:
    """One of the ranks: its pages, and what its host knows."""

    def __init__(self, rank: int, turns: Turns, spec: AttentionSpec, whole: PagedAttention, num_rows: int) -> None:
        self.number, self.size = rank, turns.size
        self.attention = attention(
            spec, whole.kv.num_pages, ContextDevices(rank, self.size, partial(turns.gather, rank))
        )
        self.rows = ContextRows(rank, self.size, PAGE, num_rows, whole.kv.num_pages)
        ids = np.arange(1, whole.kv.num_pages)
        self.ids = ids[own_pages(ids, rank, self.size) > 0]
        self.own = own_pages(self.ids, rank, self.size)
        assert self.attention.kv.num_pages == num_own_pages(whole.kv.num_pages, self.size)
        for mine, all_of_them in zip(self.attention.kv.tensors, whole.kv.tensors, strict=True):
            mine.fill_(torch.nan)
            mine[:, self.own] = all_of_them[:, self.ids]
            mine[:, 0] = 0  # padding reads it, and weighs it with nothing

    def batch(self, batch: ForwardBatch, plan: StepPlan) -> ForwardBatch:
        """The batch as this rank sees it."""
        arrays = self.rows.enter(plan) | self.rows.split(plan, batch.query_starts, 0)
        sent = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}
        blind = msgspec.structs.replace(batch, page_table=torch.full_like(batch.page_table, 1 << 30))
        return self.rows.extend(blind, plan, 0, arrays, sent)

    def has_pages_of(self, whole: PagedAttention) -> bool:
        """True if its pages are those of one device."""
        pairs = zip(self.attention.kv.tensors, whole.kv.tensors, strict=True)
        return all(torch.equal(mine[:, self.own], every[:, self.ids]) for mine, every in pairs)


def compare(
    rng: np.random.Generator, spec: AttentionSpec, size: int, lengths: Sequence[int], steps: Sequence[Chunks]
) -> None:
    """Run steps on one device and on several, and look for the same bits of outputs, keys and values."""
    requests = PagedRequests([[0] * length for length in lengths], PAGE, rng)
    for request, length in enumerate(lengths):
        requests.computed[request] = length - sum(count for step in steps for own, count in step if own == request)
    whole = attention(spec, requests.num_pages, None)
    torch.manual_seed(int(rng.integers(1 << 30)))
    for tensor in whole.kv.tensors:
        tensor.normal_()
    turns = Turns(size)
    ranks = [Rank(rank, turns, spec, whole, len(lengths)) for rank in range(size)]
    angles = torch.randn(max(lengths), spec.head_dim // 2)
    sinks = torch.randn(spec.num_heads) if spec.has_sinks else None
    layers = attention_layers(spec, RotaryTables(angles.cos(), angles.sin()), sinks=sinks)
    for step in steps:
        batch = requests.batch(step)
        plan = plan_of(requests, step, 0)
        qkv = torch.randn(len(batch.token_ids), (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)

        def run(backend: PagedAttention, own: ForwardBatch, qkv: torch.Tensor = qkv) -> torch.Tensor:
            planned = backend.plan(own)
            return torch.stack([backend.forward(qkv.clone(), layer, planned) for layer in layers])

        want, got = run(whole, batch), [torch.empty(0)] * size

        def work(rank: int, batch: ForwardBatch = batch, plan: StepPlan = plan, got: list[Any] = got) -> None:
            got[rank] = run(ranks[rank].attention, ranks[rank].batch(batch, plan))

        turns.run(work)
        for rank, own in zip(ranks, got, strict=True):
            assert torch.equal(own, want), f"rank {rank.number} of {size}, {step}: {(own - want).abs().max()}"
            assert rank.has_pages_of(whole), f"rank {rank.number} of {size} writes what one device writes"


@pytest.mark.parametrize("size", [2, 3])
def test_decodes_over_devices_have_the_bits_of_one(size: int, rng: np.random.Generator) -> None:
    """At the edges of pages, longer than sixteen splits, and with fewer pages than ranks."""
    spec = AttentionSpec(2, 4, int(rng.choice([1, 2])), 16, has_sinks=bool(rng.integers(2)))
    lengths = [1, 2, PAGE, PAGE + 1, 2 * PAGE + 1, 17 * PAGE + int(rng.integers(1, 2 * PAGE))]
    compare(rng, spec, size, [length + 1 for length in lengths], [[(0, 1), (5, 1)], [(one, 1) for one in (4, 2, 3, 1)]])


@pytest.mark.parametrize("size", [2, 3])
def test_prompts_over_devices_have_the_bits_of_one(size: int, rng: np.random.Generator) -> None:
    """Rows shared in chunks and, where they are few, not; decodes in front and behind."""
    spec = AttentionSpec(1, 4, int(rng.choice([1, 2])), 16, has_sinks=bool(rng.integers(2)))
    lengths = [int(rng.integers(PAGE, 3 * PAGE)) + 400 for _ in range(3)]
    many = [(0, 1), (1, int(rng.integers(130, 390))), (2, int(rng.integers(2, 130)))]
    compare(rng, spec, size, lengths, [many, [(2, 1), (0, 5), (1, 1)], [(1, 3), (2, 128)]])


def test_every_page_and_row_is_one_ranks(rng: np.random.Generator) -> None:
    for _ in range(scaled(40)):
        size, num_pages = int(rng.integers(2, 9)), int(rng.integers(1, 60))
        ids = np.arange(num_pages)
        own = np.stack([own_pages(ids, rank, size) for rank in range(size)])
        assert (own > 0).sum(0).tolist() == [0] + [1] * (num_pages - 1)
        for places in own:
            held = places[places > 0]
            assert held.tolist() == list(range(1, len(held) + 1))
        assert own.max() + 1 <= num_own_pages(num_pages, size)
        assert (num_own_pages(num_pages, size) - 1) * size < num_pages - 1 + size
