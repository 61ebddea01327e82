"""Backend `cpu`: paged and batched attention in torch, for bf16 and float32 on CPUs.

Requests with one token in the step (decodes) are computed together, in buckets of similar context; the others
(prefill chunks) one by one, in chunks of queries, so that the causal half of the work is left out. Heads that share
keys are packed into one product. A request's padded length follows from its own context alone, so that the company
in its batch does not change the shape, and with it the rounding, of its sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.decode_buckets import DecodeBucket, decode_buckets
from tokenmill.attention.kv_pool import KVPool
from tokenmill.attention.protocol import AttentionSpec
from tokenmill.kernels.heads import CosSin, HeadNorms, RotaryTables, split_heads

QUERY_CHUNK = 128
MAX_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """What the layers of a step share.

    Attributes:
        slot_rows: where the pool writes the tokens.
        prefills: requests with several tokens: index, and the rows of all its pages in the pool.
        buckets: decode buckets by window, made when the first layer with that window asks.
    """

    batch: ForwardBatch
    cos_sin: CosSin
    slot_rows: torch.Tensor
    prefills: tuple[tuple[int, torch.Tensor], ...]
    buckets: dict[int | None, list[DecodeBucket]] = field(default_factory=dict)


class CpuAttention:
    """Attention for the CPU platform; see the module's text."""

    name = "cpu"

    def __init__(self, spec: AttentionSpec, kv: KVPool) -> None:
        self.spec = spec
        self.kv = kv
        self._group = spec.num_heads // spec.num_kv_heads
        # True where the key is later than the query.
        self._future = torch.ones(QUERY_CHUNK, QUERY_CHUNK, dtype=torch.bool).triu_(1)

    def plan(self, batch: ForwardBatch, rotary: RotaryTables) -> CpuPlan:
        """Tell prefills from decodes, and find the rows of the pool that all layers read and write."""
        held = -(-batch.context_lens // self.kv.page_size)
        prefills = tuple(
            (request, self.kv.page_rows(batch.page_table[request, : held[request]]))
            for request in np.flatnonzero(batch.query_lens > 1).tolist()
        )
        return CpuPlan(batch, rotary.lookup(batch.positions), self.kv.slot_rows(batch.slots), prefills)

    def forward(
        self,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        layer: int,
        plan: CpuPlan,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        batch = plan.batch
        q, k, v = split_heads(qkv, (self.spec.num_heads, self.spec.num_kv_heads), norms, plan.cos_sin)
        self.kv.write(layer, plan.slot_rows, k, v)
        if window not in plan.buckets:
            plan.buckets[window] = decode_buckets(batch, self.kv, window)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for bucket in plan.buckets[window]:
            output.index_copy_(0, bucket.tokens, self._decode(q.index_select(0, bucket.tokens), layer, bucket))
        for request, page_rows in plan.prefills:
            start, end = batch.query_starts[request : request + 2].tolist()
            keys, values = self.kv.gather(layer, page_rows)
            context_len = int(batch.context_lens[request])
            memory = keys[:, :context_len], values[:, :context_len]
            self._prefill(q[start:end], *memory, output[start:end], window)
        return output.flatten(1)

    def _decode(self, q: torch.Tensor, layer: int, bucket: DecodeBucket) -> torch.Tensor:
        """One token each of n requests: q [n, heads, head_dim] -> the same shape."""
        n, kv_heads, head_dim = q.shape[0], self.spec.num_kv_heads, self.spec.head_dim
        keys, values = self.kv.gather(layer, bucket.page_rows)
        # Weights of 0 do not hide a NaN or an infinity that an earlier owner left in a slot.
        values.index_fill_(1, bucket.stale, 0)
        keys, values = keys.view(kv_heads * n, -1, head_dim), values.view(kv_heads * n, -1, head_dim)
        packed = q.view(n, kv_heads, self._group, head_dim).transpose(0, 1).reshape(kv_heads * n, -1, head_dim)
        scores = torch.bmm(packed, keys.transpose(1, 2)).mul_(self.spec.scale)
        scores.view(kv_heads, n, self._group, -1).masked_fill_(bucket.hidden, -torch.inf)
        attended = torch.bmm(scores.softmax(-1), values)
        return attended.view(kv_heads, n, self._group, head_dim).transpose(0, 1).reshape(q.shape)

    def _prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor, window: int | None
    ) -> None:
        """The last n tokens of one request, into output.

        Args:
            q, output: [n, heads, head_dim]. keys, values: [kv_heads, context, head_dim].
        """
        n, kv_heads, head_dim = q.shape[0], self.spec.num_kv_heads, self.spec.head_dim
        packed = q.view(n, kv_heads, self._group, head_dim).permute(1, 2, 0, 3)
        unpacked = output.view(n, kv_heads, self._group, head_dim).permute(1, 2, 0, 3)
        computed = keys.shape[1] - n
        # Long contexts get smaller chunks, so that the scores stay small.
        step = min(QUERY_CHUNK, max(1, MAX_SCORES // (self.spec.num_heads * keys.shape[1])))
        for start in range(0, n, step):
            end = min(start + step, n)
            #  |first|<- visible to some of these queries ->|last|
            last = computed + end
            first = 0 if window is None else max(0, computed + start + 1 - window)
            chunk = packed[:, :, start:end].reshape(kv_heads, -1, head_dim)
            scores = torch.bmm(chunk, keys[:, first:last].transpose(1, 2)).mul_(self.spec.scale)
            self._hide(scores.view(kv_heads, self._group, end - start, last - first), window)
            attended = torch.bmm(scores.softmax(-1), values[:, first:last])
            unpacked[:, :, start:end] = attended.view(kv_heads, self._group, end - start, head_dim)

    def _hide(self, scores: torch.Tensor, window: int | None) -> None:
        """Set scores [.., .., n, length] that causality or the window hides to -inf; they end at the same token."""
        n, length = scores.shape[-2:]
        scores[..., length - n :].masked_fill_(self._future[:n, :n], -torch.inf)
        if window is not None and length > window:
            queries = torch.arange(length - n, length, device=scores.device)[:, None]
            scores.masked_fill_(torch.arange(length, device=scores.device) <= queries - window, -torch.inf)
