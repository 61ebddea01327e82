"""Backend `reference`: attention written to be read, one request at a time, in float32. The oracle for all backends."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.attention.tensor_kv import HeadMajorKV
from tokenmill.model.kernels.heads import StepAngles
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.kernels.torch_heads import split_heads


class ReferencePlan(msgspec.Struct, frozen=True):
    """The batch of a step, its angles and its tokens' sights, see `MediaTokens`."""

    batch: ForwardBatch
    angles: StepAngles
    sights: torch.Tensor | None


class ReferenceAttention:
    """The `AttentionBackend` in plain torch, for any device."""

    def __init__(self, spec: AttentionSpec, kv: HeadMajorKV) -> None:
        self.spec = spec
        self.kv = kv

    def plan(self, batch: ForwardBatch) -> ReferencePlan:
        """Keep the batch and its rotary angles."""
        return ReferencePlan(batch, angles_of(batch), sights_of(batch, self.spec))

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, plan: ReferencePlan) -> torch.Tensor:
        """Write k and v into the cache, then attend one request at a time in float32."""
        batch = plan.batch
        heads = (self.spec.num_heads, 0 if layer.reads_only else self.spec.num_kv_heads)
        q, k, v = split_heads(qkv, heads, layer.norms, plan.angles.angles_of(layer.rotary))
        if not layer.reads_only:
            self.kv.write(layer.index, self.kv.slot_rows(batch.slots), k, v)
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        for request, context_len in enumerate(batch.context_lens.tolist()):
            start, end = batch.query_starts[request : request + 2].tolist()
            num_pages = -(-context_len // self.kv.page_size)
            keys, values = self.kv.gather(layer.index, self.kv.page_rows(batch.page_table[request, :num_pages]))
            sights = None if plan.sights is None else plan.sights[start:end]
            own = q[start:end], keys[:, :context_len], values[:, :context_len]
            output[start:end] = attend_sequence(*own, layer, sights)
        return output.flatten(1)

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, slots: torch.Tensor) -> None:
        """Write keys and values of clips; see `ClipAttention`."""
        self.kv.write(layer.index, self.kv.slot_rows(slots), k, v)


def angles_of(batch: ForwardBatch) -> StepAngles:
    """Return the rotary angles of a step's tokens."""
    angles = None if batch.media is None else batch.media.angles
    return StepAngles(batch.positions) if angles is None else StepAngles(angles.positions, angles.axes)


def sights_of(batch: ForwardBatch, spec: AttentionSpec) -> torch.Tensor | None:
    """Return the last position that each token of a step sees, [T]; None: no token sees one behind it."""
    return batch.media.sights if batch.media is not None and spec.spans_see_ahead else None


def attend_sequence(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: AttentionLayer,
    sights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the last n tokens of a sequence, q [n, heads, head_dim], to all its keys [kv_heads, length, head_dim].

    Args:
        sights: [n], the last position that each sees; None: as the layer says.
    """
    group = q.shape[1] // len(keys)
    length = keys.shape[1]
    # What lies behind the window of all queries is not read at all: it may be another request's, or no numbers.
    behind = 0 if layer.window is None else length - q.shape[0] + 1 - layer.window
    first = max(layer.first_key, behind)
    key_positions = torch.arange(first, length, device=q.device)
    query_positions = torch.arange(length - q.shape[0], length, device=q.device)[:, None]
    keys = keys[:, first:].float().repeat_interleave(group, 0)
    values = values[:, first:].float().repeat_interleave(group, 0)
    is_there = layer.reads_only or layer.ahead == 0 or length == q.shape[0]
    assert is_there, "what a token sees ahead of it is in the step, or was written before"
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * layer.scale
    if layer.slopes is not None:
        scores -= falls(layer.slopes, query_positions, key_positions)
    last_seen = query_positions + (length if layer.ahead is None else layer.ahead)
    visible = key_positions <= (last_seen if sights is None else sights[:, None])
    if layer.window is not None:
        visible &= key_positions > query_positions - layer.window
    sinks = None if layer.sinks is None else tensor_over(layer.sinks).view(-1, 1, 1)
    weights = softmax(scores.masked_fill(~visible, -torch.inf), sinks)
    return (weights @ values).transpose(0, 1).to(q.dtype)


def falls(slopes: Sequence[float], queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the number that each score falls by with distance, [heads, n, length] float32.

    Args:
        slopes: see `AttentionLayer`. queries: [n, 1], positions. keys: [length], positions.
    """
    return torch.tensor(slopes, device=keys.device)[:, None, None] * (queries - keys).abs()


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax over the last dimension, with sinks, if given, as the scores of one more key per row.

    Sinks must expand to the shape of the scores of one key.
    """
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), -1).softmax(-1)[..., :-1]
