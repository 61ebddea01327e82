"""Pages that requests share are read for all of them at once, and no bit of any result tells."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.canonical import export, import_
from tests.model.kernels.native import BEST, ISAS, every_isa, kernels
from tests.paging import PagedRequests, attention_layers
from tokenmill.model.attention.backends.native import NativeAttention
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.packed_kv import PackedKV
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.kernels.heads import RotaryTables

KV_SPLIT = 512
QUERY_TILE_ROWS = 48
kv_dtypes = pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4"])


@dataclass
class Family:
    """Requests in the middle of their sequences, whose beginnings are equal to those of others.

    Attributes:
        origins: the request that each takes its beginning from, an earlier one or itself.
        shared: tokens of that beginning, whole pages.
    """

    rng: np.random.Generator
    spec: AttentionSpec
    page_size: int
    contexts: list[int] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)

    @classmethod
    def draw(cls, rng: np.random.Generator, requests: int, longest: int) -> Family:
        kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 2, 5, 8, 30]))
        head_dim = int(rng.choice([16, 32, 48, 64, 128], p=[0.2, 0.3, 0.2, 0.2, 0.1]))
        spec = AttentionSpec(1, kv_heads * group, kv_heads, head_dim)
        family = cls(rng, spec, int(rng.choice([16, 32, 64])))
        for request in range(requests):
            origin = int(rng.integers(0, request + 1))
            context = int(rng.integers(1, longest))
            queries = 1 if rng.random() < 0.7 else int(rng.integers(1, min(context, 30) + 1))
            computed = family.contexts[origin] - family.queries[origin] if origin < request else 0
            common = min(context - queries, computed)
            if rng.random() < 0.3:
                common = int(rng.integers(0, common + 1))
            family.add(context, queries, origin, common)
        return family

    def add(self, context: int, queries: int, origin: int, shared: int) -> None:
        self.contexts.append(context)
        self.queries.append(queries)
        self.origins.append(origin)
        self.shared.append(shared // self.page_size * self.page_size)

    def requests(self) -> PagedRequests:
        """Each on pages of its own."""
        requests = PagedRequests([[0] * context for context in self.contexts], self.page_size, self.rng)
        requests.computed = [context - count for context, count in zip(self.contexts, self.queries, strict=True)]
        return requests

    def memory(self, requests: PagedRequests, poison: float) -> torch.Tensor:
        """Canonical pages: equal beginnings in copies, poison where nothing is computed."""
        shape = (requests.num_pages, 2, self.page_size, self.spec.num_kv_heads, self.spec.head_dim)
        memory = torch.full(shape, poison).bfloat16()
        for request, (pages, origin) in enumerate(zip(requests.pages, self.origins, strict=True)):
            computed = requests.computed[request]
            for number, page in enumerate(pages):
                filled = min(max(computed - number * self.page_size, 0), self.page_size)
                if (number + 1) * self.page_size <= self.shared[request]:
                    memory[page] = memory[requests.pages[origin][number]]
                else:
                    memory[page, :, :filled] = torch.randn(2, filled, *shape[3:]).bfloat16()
        return memory.transpose(0, 1)[None]

    def share(self, requests: PagedRequests, batch: ForwardBatch) -> None:
        """Lets the page table name the first copy of every beginning."""
        table = batch.page_table.numpy()
        for request, origin in enumerate(self.origins):
            count = self.shared[request] // self.page_size
            assert count <= len(requests.pages[origin])
            table[request, :count] = table[origin, :count]

    def shared_splits(self, table: np.ndarray) -> list[int]:
        """By the definition: a split is shared while the tiles of those who share it are fewer than they are."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        splits = [0] * len(self.contexts)
        for request in range(len(splits)):
            for split in range(max(self.contexts) // KV_SPLIT):
                end = (split + 1) * KV_SPLIT
                same = [
                    other
                    for other, (context, queries) in enumerate(zip(self.contexts, self.queries, strict=True))
                    if context - queries >= end
                    and queries * group <= QUERY_TILE_ROWS
                    and (table[other, : end // self.page_size] == table[request, : end // self.page_size]).all()
                ]
                rows = sum(self.queries[other] * group for other in same)
                if request in same and -(-rows // QUERY_TILE_ROWS) < len(same):
                    splits[request] = split + 1
        return splits


def angles(length: int, head_dim: int) -> RotaryTables:
    table = torch.outer(torch.arange(length).float(), 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim))
    return RotaryTables(table.cos().bfloat16(), table.sin().bfloat16())


def compare(
    family: Family,
    isa: str,
    kv_dtype: str,
    window: int | None = None,
    broken: tuple[int, int] | None = None,
) -> list[int]:
    """Runs a step over copies and over shared pages, which must have the same bits; the splits that were shared.

    Args:
        broken: a request, and a position of its whose value is infinite.
    """
    rng, requests, spec = family.rng, family.requests(), family.spec
    memory = family.memory(requests, float(rng.choice([float("nan"), float("inf"), 0.0])))
    if broken is not None:
        holders = [broken[0]]
        for request, origin in enumerate(family.origins):
            if origin in holders and request != origin and broken[1] < family.shared[request]:
                holders.append(request)
        for holder in holders:
            page = requests.pages[holder][broken[1] // family.page_size]
            memory[0, 1, page, broken[1] % family.page_size] = float("inf")
    batch = requests.batch(list(enumerate(family.queries)))
    qkv = torch.randn(len(batch.token_ids), (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim).bfloat16()
    rotary = angles(max(family.contexts), spec.head_dim)
    layer = attention_layers(spec, rotary, None, window)[0]
    results = []
    for threads in (int(rng.integers(1, 4)), int(rng.choice([1, 2, 5, 40]))):
        kv = PackedKV(spec, requests.num_pages, family.page_size, kv_dtype, "cpu")
        import_(kv, range(requests.num_pages), memory)
        attention = NativeAttention(spec, kv, kernels(isa, threads))
        if results:
            family.share(requests, batch)
        plan = attention.plan(batch)
        # Twice: counters and partial results of the plan are those of every layer.
        outputs = [attention.forward(qkv.clone(), layer, plan) for _ in range(2)]
        assert torch.equal(*(output.view(torch.int16) for output in outputs))
        own = batch.slots.numpy()
        slots = export(kv, range(requests.num_pages)).flatten(2, 3)[:, :, own]
        results.append((plan.step.shared_splits, outputs[0], slots))
    (copied, want, written), (shared, got, also) = results
    assert not any(copied), "copies are not shared"
    text = f"{family}, window {window}"
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=text)
    torch.testing.assert_close(also, written, rtol=0, atol=0, equal_nan=True, msg=text)
    assert shared == family.shared_splits(batch.page_table.numpy()), text
    return shared


@kv_dtypes
@every_isa
def test_shared_pages_change_no_bit(isa: str, kv_dtype: str, rng: np.random.Generator) -> None:
    for _ in range(3):
        family = Family.draw(rng, int(rng.integers(2, 10)), 1800 if isa in BEST else 1100)
        window = None if rng.random() < 0.5 else int(rng.integers(1, 1200))
        compare(family, isa, kv_dtype, window)


@kv_dtypes
@pytest.mark.parametrize("isa", BEST)
def test_groups_larger_than_a_tile(isa: str, kv_dtype: str, rng: np.random.Generator) -> None:
    family = Family(rng, AttentionSpec(1, 4, 2, 32), int(rng.choice([16, 32, 64])))
    family.add(1100, 1, 0, 0)
    for _ in range(int(rng.integers(26, 55))):
        family.add(1024 + int(rng.integers(1, 90)), 1, 0, 1024)
    assert set(compare(family, isa, kv_dtype, int(rng.integers(30, 1100)))) == {2}


@every_isa
def test_a_broken_token_that_a_window_hides_from_some(isa: str, rng: np.random.Generator) -> None:
    """It is in a tile with rows that see it."""
    window = 600
    family = Family(rng, AttentionSpec(1, 4, 2, 32), 16)
    for context in (1030, 1050, 1090, 1200):
        family.add(context, 1, 0, 1024 if family.contexts else 0)
    shared = compare(family, isa, "bfloat16", window, broken=(0, 1060 - window))
    assert shared == [2, 2, 2, 2]


@pytest.mark.parametrize("num_kv_heads", [1, 4, 8])
def test_splits_are_merged_in_order_however_prefixes_are_cut(num_kv_heads: int, rng: np.random.Generator) -> None:
    """Long prefixes, and longer ones of some within: whether threads have enough pieces depends on the heads."""
    family = Family(rng, AttentionSpec(1, 2 * num_kv_heads, num_kv_heads, 64), 32)
    family.add(4200, 1, 0, 0)
    for origin, shared in ((0, 4096), (0, 2048), (2, 4096), (2, 4096), (0, 2048), (0, 2048)):
        family.add(shared + int(rng.integers(20, 90)) if shared == 4096 else 4200, 1, origin, shared)
    assert compare(family, BEST[0], "bfloat16") == [8, 8, 8, 8, 8, 4, 4]


def test_groups_within_groups(rng: np.random.Generator) -> None:
    family = Family(rng, AttentionSpec(1, 8, 2, 32), 32)
    family.add(2300, 1, 0, 0)
    family.add(2200, 1, 0, 2048)
    family.add(1700, 2, 0, 600)
    family.add(1700, 1, 2, 1536)
    family.add(600, 20, 0, 0)
    family.add(700, 1, 0, 544)
    assert compare(family, ISAS[-1], "bfloat16") == [4, 4, 3, 3, 0, 1]


def test_pages_equal_behind_a_difference_are_not_shared(rng: np.random.Generator) -> None:
    """Only leading splits are: a page table may be anything."""
    spec = AttentionSpec(1, 4, 2, 32)
    requests = PagedRequests([[0] * 1100, [0] * 1100], 16, rng)
    requests.computed = [1099, 1099]
    attention = NativeAttention(spec, PackedKV(spec, requests.num_pages, 16, "bfloat16", "cpu"), kernels(BEST[0]))
    batch = requests.batch([(0, 1), (1, 1)])
    batch.page_table[1, 1:] = batch.page_table[0, 1:]
    assert attention.plan(batch).step.shared_splits == [0, 0]
    batch.page_table[1] = batch.page_table[0]
    batch.page_table[1, 40] += 1
    assert attention.plan(batch).step.shared_splits == [1, 1]
