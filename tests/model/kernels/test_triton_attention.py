"""Paged attention against attention written out per token, over memory whose unused slots are poisoned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF, same
from tests.paging import drawn_sights
from tokenmill.model.attention.backends.reference import softmax
from tokenmill.model.kernels.triton import attention
from tokenmill.model.kernels.triton.attention import PagedKV, Scores, attend_decodes, attend_prompts
from tokenmill.model.kernels.triton.splits import SPLIT_ENDS, SPLIT_KEYS, Splits, level_of, list_splits

POISONS = (float("nan"), float("inf"), float("-inf"))


class Case:
    """Requests in the middle of their sequences, their keys and values scattered over pages."""

    def __init__(
        self,
        rng: np.random.Generator,
        page_size: int,
        query_lens: list[int],
        longest: int,
        contexts: list[int] | None = None,
        group: int | None = None,
        head_dim: int | None = None,
        keeps_pages: bool = False,
    ) -> None:
        """`keeps_pages`: those that all windows of a request have left are still its own."""
        self.kv_heads, self.group = int(rng.integers(1, 3)), group or int(rng.choice([1, 2, 3, 7]))
        self.head_dim = head_dim or int(rng.choice([8, 16, 20]))
        self.scale = self.head_dim**-0.5
        self.window = None if rng.random() < 0.5 else int(rng.integers(1, longest))
        self.sights: torch.Tensor | None = None
        self.sinks = None if rng.random() < 0.5 else torch.randn(self.kv_heads * self.group, device=DEVICE)
        self.ahead: int | None = 0
        self.query_lens = query_lens
        self.contexts = contexts or [count + int(rng.integers(0, longest)) for count in query_lens]
        held = [-(-context // page_size) for context in self.contexts]
        ids = 1 + rng.permutation(sum(held))
        table = np.zeros((len(held), max(held) + 1), dtype=np.int32)
        shape = (sum(held) + 1, page_size, self.kv_heads, self.head_dim)
        keys, values = (torch.full(shape, float(rng.choice(POISONS))) for _ in "kv")
        self.sequences = []
        for row, (count, context) in enumerate(zip(held, self.contexts, strict=True)):
            table[row, :count], ids = ids[:count], ids[count:]
            k, v = torch.randn(2, context, self.kv_heads, self.head_dim)
            positions = np.arange(context)
            for memory, new in ((keys, k), (values, v)):
                memory[table[row, positions // page_size], positions % page_size] = new
            self.sequences.append((k, v))
            # Pages that all of a request's windows have left may be gone: page 0 has no numbers.
            gone = (
                0
                if self.window is None or keeps_pages
                else max(0, context - query_lens[row] - self.window + 1) // page_size
            )
            table[row, :gone] = 0
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        self.kv = PagedKV(
            keys.to(DEVICE),
            values.to(DEVICE),
            torch.from_numpy(table).to(DEVICE),
            torch.tensor(self.contexts, dtype=torch.int32, device=DEVICE),
            torch.from_numpy(starts).to(DEVICE),
        )
        # Every second row of a wider tensor: tokens have a stride of their own.
        self.q = torch.randn(int(starts[-1]), 2, self.kv_heads * self.group, self.head_dim, device=DEVICE)[:, 0]

    @property
    def scores(self) -> Scores:
        return Scores(self.scale, self.window, self.sinks, self.ahead)

    def expected(self) -> torch.Tensor:
        rows = []
        for request, count in enumerate(self.query_lens):
            start = sum(self.query_lens[:request])
            for index in range(count):
                position = self.contexts[request] - count + index
                first = 0 if self.window is None else max(0, position - self.window + 1)
                last = None if self.ahead is None else position + 1 + self.ahead
                last = last if self.sights is None else int(self.sights[start + index]) + 1
                k, v = (part[first:last].double() for part in self.sequences[request])
                q = self.q[start + index].cpu().double().unflatten(0, (self.kv_heads, self.group))
                scores = torch.einsum("hgd,nhd->hgn", q, k) * self.scale
                sinks = None if self.sinks is None else self.sinks.cpu().view(self.kv_heads, self.group, 1)
                weights = softmax(scores, sinks)
                rows.append(torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1))
        return torch.stack(rows).float()


def output_of(case: Case) -> torch.Tensor:
    return torch.full(case.q.shape, torch.nan, device=DEVICE)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
def test_prompts_and_chunks_equal_attention_written_out(page_size: int, rng: np.random.Generator) -> None:
    lens = [int(count) for count in rng.choice([1, 2, 5, 30, 70], int(rng.integers(1, 4)))]
    case = Case(rng, page_size, lens, 100)
    got = output_of(case)
    attend_prompts(case.q, case.kv, got, case.scores)
    torch.testing.assert_close(got.cpu(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_texts_see_the_tokens_ahead(page_size: int, rng: np.random.Generator) -> None:
    lens = [1, *(int(count) for count in rng.choice([2, 5, 63, 64, 65, 130], 3))]
    case = Case(rng, page_size, lens, 100, lens)
    for ahead in (None, int(rng.integers(1, 80))):
        case.ahead = ahead
        got = output_of(case)
        attend_prompts(case.q, case.kv, got, case.scores)
        torch.testing.assert_close(got.cpu(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tokens_of_one_image_see_each_other(page_size: int, rng: np.random.Generator) -> None:
    lens = [1, *(int(count) for count in rng.choice([2, 5, 63, 64, 65, 130], 3))]
    case = Case(rng, page_size, lens, 100)
    ends = [case.contexts[request] - 1 for request in range(len(lens))]
    sights = [drawn_sights(rng, end + 1 - count, end + 1) for end, count in zip(ends, lens, strict=True)]
    case.sights = torch.from_numpy(np.concatenate(sights)).to(DEVICE)
    got = output_of(case)
    attend_prompts(case.q, case.kv, got, case.scores, sights=case.sights)
    torch.testing.assert_close(got.cpu(), case.expected(), rtol=1e-4, atol=1e-4)


def splits_of(
    lens: torch.Tensor,
    longest: np.ndarray,
    heads: tuple[int, int, int],
    units: int,
    *wanted: Any,
    starts: torch.Tensor | None = None,
) -> Splits | None:
    """The splits of requests with a token each, or with those that begin at `starts`."""
    if starts is None:
        starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=lens.device)
    splits = list_splits(lens, starts, longest, heads, units, *wanted)
    if splits is not None:
        # What no split has written must not be read; what nobody has listed, programs without work do read.
        splits.parts.fill_(torch.nan)
        for lists in filter(None, (splits, splits.shares)):
            lists.records[int(lists.stops[-1]) :] = -(1 << 28)
    return splits


def decode(case: Case, rows: list[int], units: int = 5, room: int = 0) -> torch.Tensor:
    """Some of a case's requests, all of one token, by themselves; `room`: how much longer the host thinks they are."""
    kv, index = case.kv, torch.tensor(rows, device=DEVICE)
    lens = kv.context_lens[index]
    starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=DEVICE)
    part = PagedKV(kv.keys, kv.values, kv.page_table[index], lens, starts)
    heads = (case.kv_heads * case.group, case.kv_heads, case.head_dim)
    splits = splits_of(lens, lens.cpu().numpy() + room, heads, units, 1, None, level_of(kv.keys.shape[1]))
    q = case.q[index]
    got = torch.full(q.shape, torch.nan, device=DEVICE)
    attend_decodes(q, part, got, case.scores, splits)
    return got.cpu()


# Around the ends of splits, and of the first one that is twice as long.
ENDS = [1, 255, 256, 257, 512, 513, 4095, 4096, 4097, 4609]


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_decodes_equal_attention_written_out(page_size: int, group: int, rng: np.random.Generator) -> None:
    contexts = [int(context) for context in rng.choice(ENDS[:6], 3)]
    if page_size >= 64:
        contexts.append(int(rng.choice(ENDS[6:])))
    case = Case(rng, page_size, [1] * len(contexts), 600, contexts, group)
    got = decode(case, list(range(len(contexts))), int(rng.choice([1, 3, 100])))
    torch.testing.assert_close(got, case.expected(), rtol=1e-4, atol=1e-4, msg=lambda text: f"{text}\n{contexts}")


@pytest.mark.parametrize("page_size", [1, 16])
def test_short_decodes_need_no_splits(page_size: int, rng: np.random.Generator) -> None:
    case = Case(rng, page_size, [1] * int(rng.integers(1, 4)), 256)
    assert splits_of(case.kv.context_lens, np.array(case.contexts), (1, 1, 1), 1) is None
    got = decode(case, list(range(len(case.contexts))))
    torch.testing.assert_close(got, case.expected(), rtol=1e-4, atol=1e-4)


def test_a_decode_has_the_same_bits_in_every_company_and_where_longer_ones_were_possible(
    rng: np.random.Generator,
) -> None:
    contexts = [int(context) for context in rng.choice([3, 200, 256, 257, 513, 700], 4)]
    case = Case(rng, 16, [1] * 4, 900, contexts)
    together = decode(case, [0, 1, 2, 3], 4, room=int(rng.choice([0, 300, 40000])))
    order = [int(row) for row in rng.permutation(4)]
    assert torch.equal(decode(case, order, 1), together[order])
    for row in order[:2]:
        assert torch.equal(decode(case, [row], 2)[0], together[row])


def with_common_pages(case: Case, page_size: int, rng: np.random.Generator) -> None:
    """Give some requests the leading pages of another, and what these hold: of one group, of two, of pairs."""
    leaders = rng.choice(len(case.contexts), int(rng.integers(1, 3)), replace=False)
    table, contexts = case.kv.page_table, case.contexts
    for request in set(range(len(contexts))) - set(leaders.tolist()):
        leader = int(rng.choice(leaders))
        most = min(contexts[leader], contexts[request]) // page_size
        count = int(rng.choice([0, most // 2, most, most]))
        table[request, :count] = table[leader, :count].clone()
        for own, its in zip(case.sequences[request], case.sequences[leader], strict=True):
            own[: count * page_size] = its[: count * page_size]


@pytest.mark.parametrize(("count", "group"), [(3, 1), (9, 2), (4, 8), (2, 9)])
def test_pages_in_common_are_read_once_and_give_the_bits_of_pages_read_by_each(
    count: int, group: int, rng: np.random.Generator
) -> None:
    page_size = int(rng.choice([1, 16, 64, SPLIT_KEYS]))
    contexts = [int(context) for context in rng.integers(500, 700, count)]
    contexts[0] = 513  # the last token alone in a split
    case = Case(rng, page_size, [1] * count, 900, contexts, group, keeps_pages=True)
    with_common_pages(case, page_size, rng)
    heads, kv = (case.kv_heads * case.group, case.kv_heads, case.head_dim), case.kv
    results = []
    for pages in (None, (kv.page_table, page_size)):
        wanted = (1, pages, level_of(page_size))
        splits = splits_of(kv.context_lens, np.array(contexts), heads, int(rng.choice([1, 4, 100])), *wanted)
        assert splits is not None
        results.append(output_of(case))
        attend_decodes(case.q, kv, results[-1], case.scores, splits)
    assert same(results[1], results[0]), "the same sums, whoever computes them"
    torch.testing.assert_close(results[1].cpu(), case.expected(), rtol=1e-4, atol=1e-4)
    assert (splits.shares is None) == (group > 8), "a tile of sixteen rows has room for the heads of one request"


def test_requests_with_a_prefix_in_common_read_it_once_a_tile(rng: np.random.Generator) -> None:
    """Two prefixes of three splits each, in any order of the batch; behind it, each its own keys."""
    page_size, count = int(rng.choice([16, 64])), int(rng.integers(3, 40))
    width, prefix = 1200 // page_size + 1, 768 // page_size
    table = 1 + torch.arange(count * width, dtype=torch.int32).view(count, width)
    kinds = torch.from_numpy(rng.integers(0, 2, count))
    table[:, :prefix] = 100_000 + 1000 * kinds[:, None].int() + torch.arange(prefix, dtype=torch.int32)
    lens = torch.from_numpy(rng.integers(769, 1025, count).astype(np.int32)).to(DEVICE)
    table = table.masked_fill(torch.arange(width) * page_size >= lens.cpu()[:, None], 0).to(DEVICE)
    splits = splits_of(lens, lens.cpu().numpy() + 5000, (8, 4, 16), 4, 1, (table, page_size))
    assert splits is not None
    assert splits.shares is not None
    # All have four splits. Eight requests to a tile, which begins anew with the other prefix.
    order = [*torch.nonzero(kinds == 0).flatten().tolist(), *torch.nonzero(kinds == 1).flatten().tolist()]
    ordered = kinds[torch.tensor(order)].tolist()
    wanted = [4 - 3 * (place % 8 > 0 and ordered[place] == ordered[place - 1]) for place in range(count)]
    assert splits.shares.members[:, 0].tolist() == order
    assert splits.shares.stops.tolist() == np.cumsum(wanted).tolist()
    assert splits.shares.records[: sum(wanted), 0].tolist() == np.repeat(order, wanted).tolist()


def test_the_lists_are_those_of_a_slow_search(rng: np.random.Generator) -> None:
    """Tables of more pages than are compared at once, lengths up to splits of the second level, splits of a page."""
    page_size, count, group = int(rng.choice([1, 2, SPLIT_KEYS])), int(rng.integers(2, 20)), int(rng.choice([1, 2, 8]))
    stops = np.arange(1, 60) * page_size if page_size == SPLIT_KEYS else SPLIT_ENDS
    lens = rng.integers(1, 6000, count).astype(np.int32)
    table = rng.integers(1, 1 << 30, (count, 6000 // page_size + 1)).astype(np.int32)
    for row in range(1, count):
        leader, same = int(rng.integers(0, row)), int(rng.choice([0, 1, 700, 1024, 1500, table.shape[1]]))
        table[row, :same] = table[leader, :same]
    table[np.arange(table.shape[1]) * page_size >= lens[:, None]] = 0
    pages = torch.from_numpy(table).to(DEVICE), page_size
    splits = splits_of(torch.from_numpy(lens).to(DEVICE), lens + 300, (group, 1, 16), 4, 1, pages, level_of(page_size))
    assert splits is not None and splits.shares is not None
    counts = np.searchsorted(stops, lens) + 1
    order = sorted(range(count), key=lambda row: (table[row, 0], row))
    shared = np.zeros(count, dtype=np.int64)
    for place in range(1, count):
        own, other = order[place], order[place - 1]
        differ = np.flatnonzero(table[own] != table[other])
        keys = min((differ[0] if len(differ) else table.shape[1]) * page_size, min(lens[own], lens[other]) - 1)
        shared[place] = np.searchsorted(stops, keys, side="right") if place % (16 // group) else 0
    first_parts = (counts.cumsum() - counts)[order]
    assert splits.shares.members[:, :3].tolist() == np.stack((order, first_parts, shared), 1).tolist()
    own = (splits, np.arange(count), counts, 0 * shared)
    for lists, requests, wanted, begins in (own, (splits.shares, np.array(order), counts[order] - shared, shared)):
        assert lists.stops.tolist() == np.cumsum(wanted).tolist()
        places = np.repeat(np.arange(count), wanted)
        numbers = begins[places] + np.arange(wanted.sum()) - np.repeat(wanted.cumsum() - wanted, wanted)
        # Requests have a token each: the token of a place in their own order is that place.
        listed = np.stack((requests[places], numbers, places, lens[requests[places]]), 1)
        assert lists.records[: wanted.sum()].tolist() == listed.tolist()


@pytest.mark.parametrize(("most", "group"), [(3, 1), (3, 5), (9, 2), (9, 20)])
def test_decodes_with_drafts_equal_attention_written_out_and_each_token_by_itself(
    most: int, group: int, rng: np.random.Generator
) -> None:
    """Around the ends of splits, where a token's context ends in a split before that of the draft behind it."""
    lens = [most, *(int(count) for count in rng.integers(1, most + 1, 2))]
    contexts = [int(rng.choice([256, 512])) + int(rng.integers(0, most)), int(rng.integers(most, 40)), 300]
    if rng.random() < 0.3:
        contexts = [int(rng.integers(most, 200)) for _ in contexts]  # no splits
    case = Case(rng, int(rng.choice([1, 16])), lens, 400, contexts, group)
    kv, total = case.kv, sum(lens)
    heads = (case.kv_heads * case.group, case.kv_heads, case.head_dim)
    # Behind the last request are tokens of nobody.
    q = torch.full((len(lens) * most, *case.q.shape[1:]), torch.nan, device=DEVICE)
    q[:total] = case.q
    units, starts = int(rng.choice([1, 3, 100])), kv.query_starts
    splits = splits_of(kv.context_lens, np.array(contexts), heads, units, most, starts=starts)
    assert (splits is None) == (max(contexts) <= 256 or most * group > 128), "what no tile holds is not split"
    got = torch.full(q.shape, torch.nan, device=DEVICE)
    attend_decodes(q, kv, got, case.scores, splits)
    torch.testing.assert_close(got[:total].cpu(), case.expected(), rtol=1e-4, atol=1e-4, msg=f"{lens} {contexts}")
    assert got[total:].isnan().all()
    if splits is None:
        return
    rows = np.repeat(np.arange(len(lens)), lens)
    own = np.concatenate([np.arange(end - count, end) + 1 for count, end in zip(lens, contexts, strict=True)])
    own_lens = torch.tensor(own, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(total + 1, dtype=torch.int32, device=DEVICE)
    single = PagedKV(kv.keys, kv.values, kv.page_table[torch.from_numpy(rows).to(DEVICE)], own_lens, starts)
    alone = torch.full(case.q.shape, torch.nan, device=DEVICE)
    splits = splits_of(own_lens, own.astype(np.int32), heads, 3)
    attend_decodes(case.q.contiguous(), single, alone, case.scores, splits)
    torch.testing.assert_close(got[:total], alone, rtol=1e-5, atol=1e-6)


def test_splits_follow_each_other_and_cover_every_context(rng: np.random.Generator) -> None:
    lengths = np.concatenate([ENDS, rng.integers(1, 300_000, 300)]).astype(np.int32)
    rng.shuffle(lengths)
    splits = splits_of(torch.from_numpy(lengths).to(DEVICE), lengths + 512, (2, 1, 8), 132)
    assert splits is not None
    wanted = []
    for request, length in enumerate(lengths):
        # 256 keys, after sixteen splits 512, after sixteen more 1,024.
        end = count = 0
        while end < length:
            end += 256 * 2 ** (count // 16)
            count += 1
        wanted += [request] * count
        assert splits.stops[request] == len(wanted)
    assert splits.records[: len(wanted), 0].tolist() == wanted
    assert len(splits.records) == len(splits.parts) >= len(wanted)
    assert splits.num_programs == 3 * 132


def test_prompts_behind_decodes_leave_the_decodes_alone(rng: np.random.Generator) -> None:
    case = Case(rng, 4, [1, 1, 6, 20], 40)
    kv = case.kv
    got, whole = output_of(case), case.expected()
    rest = PagedKV(kv.keys, kv.values, kv.page_table[2:], kv.context_lens[2:], kv.query_starts[2:])
    attend_prompts(case.q, rest, got, case.scores)
    assert got[:2].isnan().all()
    torch.testing.assert_close(got[2:].cpu(), whole[2:], rtol=1e-4, atol=1e-4)


def test_a_token_of_a_prompt_is_the_same_in_every_chunk_and_company(
    rng: np.random.Generator,
) -> None:
    """As the last token of a long chunk, of a short one and alone among others."""
    case = Case(rng, 4, [40, 3], 100)
    together = output_of(case)
    attend_prompts(case.q, case.kv, together, case.scores)
    kv = case.kv
    for count in (1, 2, 17):
        starts = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        alone = PagedKV(kv.keys, kv.values, kv.page_table[:1], kv.context_lens[:1], starts)
        q = case.q[40 - count : 40]
        for are_single in (False, True)[: 1 + (count == 1)]:
            got = torch.empty(q.shape, device=DEVICE)
            attend_prompts(q, alone, got, case.scores, are_single=are_single)
            assert same(got, together[40 - count : 40])


def test_half_precision_stays_near(rng: np.random.Generator) -> None:
    case = Case(rng, 16, [1, 9], 100)
    kv = case.kv
    half = PagedKV(kv.keys.to(HALF), kv.values.to(HALF), kv.page_table, kv.context_lens, kv.query_starts)
    got = torch.empty(case.q.shape, dtype=HALF, device=DEVICE)
    attend_prompts(case.q.to(HALF), half, got, case.scores)
    torch.testing.assert_close(got.float().cpu(), case.expected(), rtol=0.05, atol=0.05)


def test_tiles_are_wide_enough_for_matrix_units() -> None:
    assert attention.DECODE_ROWS >= 16
    assert attention.TILE_KEYS % 16 == 0
