"""Backend `cpu`: paged and batched attention in torch, for bfloat16 and float32 on CPUs.

Requests with one token in the step (decodes) are computed together, in buckets of similar context; so are short texts
of one length whose tokens all see each other; the others (prefill chunks) one by one, in chunks of queries, so that the
causal half of the work is left out. Heads that share keys are packed into one product. A request's padded length
follows from its own context alone, so that the other requests of its batch change neither the shape nor the rounding of
its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tokenmill.model.attention.backends.reference import angles_of, falls, sights_of, softmax
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.attention.tensor_kv import HeadMajorKV
from tokenmill.model.kernels.heads import StepAngles
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.kernels.torch_heads import split_heads

if TYPE_CHECKING:
    from tokenmill.model.attention.context import ContextRanks

QUERY_CHUNK = 128
MAX_SCORES = 1 << 24
# Scores of short texts that are computed together: they stay in the CPU's cache.
TEXT_SCORES = 1 << 18
# The shortest length that decodes are padded to, and the length from which the steps are finer.
SHORTEST = 32
FINE_FROM = 512
# Keys, or values, of a bucket in one layer. Gathered and used at once, they never leave the CPU's cache; and the
# copies stay small beside the KV cache itself.
BUCKET_BYTES = 2 << 20


class DecodeBucket(msgspec.Struct, frozen=True):
    """n requests with one token each, all padded to the same number of pages.

    Attributes:
        tokens: [n] int64, their tokens in the batch.
        page_rows: rows of the cache of the P pages of each, n * P pages in all.
        hidden: [n, 1, L] bool, True at slots outside the request's context or window; L = P * page_size.
        stale: the same slots as int64 indices into n * L.
    """

    tokens: torch.Tensor
    page_rows: torch.Tensor
    hidden: torch.Tensor
    stale: torch.Tensor


class Texts(msgspec.Struct, frozen=True):
    """n requests whose whole contexts, of one length, are in the step.

    Attributes:
        tokens: [n * length] int64, theirs in the batch.
    """

    tokens: torch.Tensor
    length: int


class CpuPlan(msgspec.Struct, frozen=True):
    """The data shared by the layers of a step.

    Attributes:
        slot_rows: rows of the cache to which the tokens are written.
        prefills: requests with several tokens: index, and the rows of all its pages in the cache.
        texts: those of the prefills that layers compute together where all tokens see each other.
        sights: see `MediaTokens`.
        buckets: decode buckets by window and first key, made when the first layer with these asks.
    """

    batch: ForwardBatch
    angles: StepAngles
    slot_rows: torch.Tensor
    prefills: tuple[tuple[int, torch.Tensor], ...]
    texts: tuple[Texts, ...]
    sights: torch.Tensor | None
    buckets: dict[tuple[int | None, int], list[DecodeBucket]] = msgspec.field(default_factory=dict)


class Turns:
    """Deals the pieces of a layer's attention out to the ranks that share it; one rank takes all."""

    def __init__(self, ranks: ContextRanks | None) -> None:
        self._ranks = ranks
        self._num_pieces = 0
        self._own: list[torch.Tensor] = []

    def take(self, tokens: torch.Tensor) -> bool:
        """Return True if the next piece, of these tokens [n], is this rank's."""
        if self._ranks is None:
            return True
        is_own = self._num_pieces % self._ranks.size == self._ranks.rank
        self._num_pieces += 1
        if is_own:
            self._own.append(tokens)
        return is_own

    def of_chunks(self, first: int) -> Callable[[int, int], bool]:
        """Return the function that takes chunks of a request whose tokens begin at `first`."""
        return lambda start, end: self.take(torch.arange(first + start, first + end))

    def gather(self, output: torch.Tensor) -> torch.Tensor:
        """Return outputs [T, heads, head_dim] with the tokens of all ranks."""
        if self._ranks is None:
            return output
        where = torch.cat([torch.empty(0, dtype=torch.int64), *self._own])
        return output.copy_(self._ranks.rows(output[where].flatten(1), where, len(output)).view(output.shape))


class CpuAttention:
    """The `AttentionBackend` for the CPU platform, in batched torch."""

    def __init__(self, spec: AttentionSpec, kv: HeadMajorKV, ranks: ContextRanks | None = None) -> None:
        """
        Args:
            ranks: share the KV memory, and the buckets and chunks of each step; None: they are one rank's.
        """
        self.spec = spec
        self.kv = kv
        self._ranks = ranks
        self._group = spec.num_heads // spec.num_kv_heads
        # True where the key is later than the query.
        self._future = torch.ones(QUERY_CHUNK, QUERY_CHUNK, dtype=torch.bool).triu_(1)

    def plan(self, batch: ForwardBatch) -> CpuPlan:
        """Separate prefills from decodes, and find the rows of the cache that all layers read and write."""
        num_pages = -(-batch.context_lens // self.kv.page_size)
        prefills = tuple(
            (request, self.kv.page_rows(batch.page_table[request, : num_pages[request]]))
            for request in np.flatnonzero(batch.query_lens > 1).tolist()
        )
        texts = tuple(texts_of(batch, self.spec.num_heads)) if self._ranks is None and self.spec.sees_ahead else ()
        sights = sights_of(batch, self.spec)
        return CpuPlan(batch, angles_of(batch), self.kv.slot_rows(batch.slots), prefills, texts, sights)

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, plan: CpuPlan) -> torch.Tensor:
        """Write k and v into the cache, then attend decodes by bucket and prefills one by one."""
        batch, seen = plan.batch, (layer.window, layer.first_key)
        heads = (self.spec.num_heads, 0 if layer.reads_only else self.spec.num_kv_heads)
        q, k, v = split_heads(qkv, heads, layer.norms, plan.angles.angles_of(layer.rotary))
        if not layer.reads_only:
            self._write(layer.index, plan.slot_rows, k, v)
        if seen not in plan.buckets:
            plan.buckets[seen] = decode_buckets(batch, self.kv, *seen)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        turns = Turns(self._ranks)
        for bucket in plan.buckets[seen]:
            if not turns.take(bucket.tokens):
                continue
            output.index_copy_(0, bucket.tokens, self._decode(q.index_select(0, bucket.tokens), layer, bucket))
        texts = plan.texts if sees_whole_texts(layer) else ()
        for group in texts:
            output.index_copy_(0, group.tokens, self._attend_texts(q, k, v, layer.scale, group))
        for request, page_rows in plan.prefills:
            if texts and is_short_text(batch, request):
                continue
            start, end = batch.query_starts[request : request + 2].tolist()
            keys, values = self.kv.gather(layer.index, page_rows)
            context_len = int(batch.context_lens[request])
            memory = keys[:, :context_len], values[:, :context_len]
            sights = None if plan.sights is None else plan.sights[start:end]
            self._prefill(q[start:end], *memory, output[start:end], layer, turns.of_chunks(start), sights)
        return turns.gather(output).flatten(1)

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, slots: torch.Tensor) -> None:
        """Write keys and values of clips; see `ClipAttention`."""
        self.kv.write(layer.index, self.kv.slot_rows(slots), k, v)

    def _write(self, layer: int, slot_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values; of ranks that share the memory each writes its part of the tokens."""
        if self._ranks is None:
            self.kv.write(layer, slot_rows, k, v)
            return
        rank, size = self._ranks.rank, self._ranks.size
        own = slice(rank * len(k) // size, (rank + 1) * len(k) // size)
        self.kv.write(layer, slot_rows.view(-1, len(k))[:, own].flatten(), k[own], v[own])
        self._ranks.meet()

    def _decode(self, q: torch.Tensor, layer: AttentionLayer, bucket: DecodeBucket) -> torch.Tensor:
        """Attend one token each of n requests: q [n, heads, head_dim] -> the same shape."""
        n, kv_heads, head_dim = q.shape[0], self.spec.num_kv_heads, self.spec.head_dim
        keys, values = self.kv.gather(layer.index, bucket.page_rows)
        # Weights of 0 do not hide a NaN or an infinity that an earlier owner left in a slot.
        values.index_fill_(1, bucket.stale, 0)
        keys, values = keys.view(kv_heads * n, -1, head_dim), values.view(kv_heads * n, -1, head_dim)
        packed = q.view(n, kv_heads, self._group, head_dim).transpose(0, 1).reshape(kv_heads * n, -1, head_dim)
        scores = torch.bmm(packed, keys.transpose(1, 2)).mul_(layer.scale)
        apart = scores.view(kv_heads, n, self._group, -1).masked_fill_(bucket.hidden, -torch.inf)
        weights = softmax(
            apart, None if layer.sinks is None else tensor_over(layer.sinks).view(kv_heads, 1, self._group, 1)
        )
        attended = torch.bmm(weights.reshape(scores.shape), values)
        return attended.view(kv_heads, n, self._group, head_dim).transpose(0, 1).reshape(q.shape)

    def _attend_texts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, group: Texts
    ) -> torch.Tensor:
        """Attend all tokens of texts to all of their own: q [T, heads, head_dim] -> [n * length, heads, head_dim]."""
        kv_heads, head_dim, length = self.spec.num_kv_heads, self.spec.head_dim, group.length

        def packed(x: torch.Tensor, rows: int) -> torch.Tensor:
            apart = x.index_select(0, group.tokens).view(-1, length, kv_heads, rows, head_dim)
            return apart.permute(0, 2, 3, 1, 4).reshape(-1, rows * length, head_dim)

        weights = torch.bmm(packed(q, self._group), packed(k, 1).transpose(1, 2)).mul_(scale).softmax(-1)
        attended = torch.bmm(weights, packed(v, 1)).view(-1, kv_heads, self._group, length, head_dim)
        return attended.permute(0, 3, 1, 2, 4).reshape(-1, self.spec.num_heads, head_dim)

    def _prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        layer: AttentionLayer,
        takes: Callable[[int, int], bool],
        sights: torch.Tensor | None = None,
    ) -> None:
        """Attend the last n tokens of one request, and write output.

        Args:
            q, output: [n, heads, head_dim]. keys, values: [kv_heads, context, head_dim].
            takes: returns True if the queries from one to another are this rank's to attend.
            sights: [n], the last position that each token sees; None: as the layer says.
        """
        n, kv_heads, head_dim = q.shape[0], self.spec.num_kv_heads, self.spec.head_dim
        packed = q.view(n, kv_heads, self._group, head_dim).permute(1, 2, 0, 3)
        unpacked = output.view(n, kv_heads, self._group, head_dim).permute(1, 2, 0, 3)
        computed = keys.shape[1] - n
        # Long contexts get smaller chunks, so that the scores stay small.
        step = min(QUERY_CHUNK, max(1, MAX_SCORES // (self.spec.num_heads * keys.shape[1])))
        for start in range(0, n, step):
            end = min(start + step, n)
            if not takes(start, end):
                continue
            #  |first|<- visible to some of these queries ->|last|
            last = keys.shape[1] if layer.ahead is None else min(computed + end + layer.ahead, keys.shape[1])
            last = last if sights is None else int(sights[end - 1]) + 1
            behind = 0 if layer.window is None else computed + start + 1 - layer.window
            first = max(layer.first_key, behind)
            chunk = packed[:, :, start:end].reshape(kv_heads, -1, head_dim)
            scores = torch.bmm(chunk, keys[:, first:last].transpose(1, 2)).mul_(layer.scale)
            apart = scores.view(kv_heads, self._group, end - start, last - first)
            if layer.slopes is not None:
                places = torch.arange(keys.shape[1])
                own = falls(layer.slopes, places[computed + start : computed + end, None], places[first:last])
                apart -= own.view(apart.shape)
            if sights is not None:
                hide_sides(apart, computed + start - first, layer.window, sights[start:end] - first)
            elif layer.ahead == 0:
                self._hide(apart, layer.window)
            else:
                hide_sides(apart, start - first, layer.window, layer.ahead)
            weights = softmax(
                apart, None if layer.sinks is None else tensor_over(layer.sinks).view(kv_heads, self._group, 1, 1)
            )
            attended = torch.bmm(weights.reshape(scores.shape), values[:, first:last])
            unpacked[:, :, start:end] = attended.view(kv_heads, self._group, end - start, head_dim)

    def _hide(self, scores: torch.Tensor, window: int | None) -> None:
        """Set scores [.., .., n, length] hidden by causality or the window to -inf; both end at the same token."""
        n, length = scores.shape[-2:]
        scores[..., length - n :].masked_fill_(self._future[:n, :n], -torch.inf)
        if window is not None and length > window:
            queries = torch.arange(length - n, length, device=scores.device)[:, None]
            scores.masked_fill_(torch.arange(length, device=scores.device) <= queries - window, -torch.inf)


def sees_whole_texts(layer: AttentionLayer) -> bool:
    """Return True if nothing of a text is hidden from its tokens, weighed by distance, or another layer's."""
    is_plain = layer.window is None and layer.ahead is None and layer.first_key == 0
    return is_plain and layer.slopes is None and layer.sinks is None and not layer.reads_only


def is_short_text(batch: ForwardBatch, request: int) -> bool:
    """Return True if a request's whole context is in the step: several tokens, in one chunk."""
    return 1 < batch.query_lens[request] == batch.context_lens[request] <= QUERY_CHUNK


def texts_of(batch: ForwardBatch, num_heads: int) -> Iterator[Texts]:
    """Yield the short texts of a batch by length, about `TEXT_SCORES` scores at a time."""
    whole = (batch.query_lens == batch.context_lens) & (batch.query_lens > 1) & (batch.query_lens <= QUERY_CHUNK)
    for length in np.unique(batch.query_lens[whole]).tolist():
        starts = batch.query_starts[:-1][whole & (batch.query_lens == length)].astype(np.int64)
        most = max(1, TEXT_SCORES // (num_heads * length * length))
        for first in range(0, len(starts), most):
            tokens = starts[first : first + most, None] + np.arange(length)
            yield Texts(torch.from_numpy(tokens.flatten()), length)


def hide_sides(scores: torch.Tensor, start: int, window: int | None, ahead: int | torch.Tensor | None) -> None:
    """Set scores [.., .., n, length] outside of windows on both sides to -inf.

    Args:
        start: where the first query stands among the keys.
        ahead: keys that a query sees behind it; or, [n], the last that each sees.
    """
    queries = torch.arange(start, start + scores.shape[-2], device=scores.device)[:, None]
    keys = torch.arange(scores.shape[-1], device=scores.device)
    if window is not None:
        scores.masked_fill_(keys <= queries - window, -torch.inf)
    if ahead is not None:
        last = ahead[:, None] if isinstance(ahead, torch.Tensor) else queries + ahead
        scores.masked_fill_(keys > last, -torch.inf)


def padded_lengths(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Round up to the ladder 32, 48, 64, 96, 128 ... 512, from there in quarters of an octave: 640, 768, 896, 1024."""
    lengths = np.maximum(lengths, SHORTEST)
    octave = np.exp2(np.ceil(np.log2(lengths))).astype(np.int64)
    step = np.where(lengths <= FINE_FROM, octave // 4, octave // 8)
    return -(-lengths // step) * step


def decode_buckets(batch: ForwardBatch, kv: HeadMajorKV, window: int | None, first_key: int = 0) -> list[DecodeBucket]:
    """Sort the batch's single-token requests into buckets of equal padded length.

    With a window, only the pages that it touches are taken.
    """
    page_size = kv.page_size
    requests = np.flatnonzero(batch.query_lens == 1)
    if not len(requests):
        return []
    ends = batch.context_lens[requests].astype(np.int64)
    begins = np.maximum(first_key if window is None else ends - window, np.full_like(ends, first_key))
    first_pages = begins // page_size
    num_pages = -(-padded_lengths(ends - first_pages * page_size) // page_size)
    buckets = []
    for chosen, count in _groups(num_pages, BUCKET_BYTES // kv.keys[0, 0].nbytes):
        page_numbers = first_pages[chosen, None] + np.arange(count)
        slots = first_pages[chosen, None] * page_size + np.arange(count * page_size)
        hidden = (slots >= ends[chosen, None]) | (slots < begins[chosen, None])
        buckets.append(
            DecodeBucket(
                tokens=torch.from_numpy(batch.query_starts[requests[chosen]].astype(np.int64)),
                page_rows=kv.page_rows(_pages(batch.page_table, requests[chosen], page_numbers)),
                hidden=torch.from_numpy(hidden).unsqueeze(1),
                stale=torch.from_numpy(np.flatnonzero(hidden)),
            )
        )
    return buckets


def _groups(num_pages: npt.NDArray[np.int64], most: int) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """Yield indices of requests with equal numbers of pages, `most` pages in all unless one request alone has more."""
    for count in np.unique(num_pages).tolist():
        equal = np.flatnonzero(num_pages == count)
        size = max(1, most // count)
        for start in range(0, len(equal), size):
            yield equal[start : start + size], count


def _pages(
    page_table: torch.Tensor, requests: npt.NDArray[np.int64], page_numbers: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Return page ids at [request, number], flat. Numbers beyond the table are padding, whose slots are hidden."""
    inside = np.minimum(page_numbers, page_table.shape[1] - 1)
    table = page_table.index_select(0, torch.from_numpy(requests))
    return table.gather(1, torch.from_numpy(inside)).flatten()
