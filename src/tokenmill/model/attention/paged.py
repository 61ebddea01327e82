"""`PagedAttention`: attention on a GPU, composed of an implementation for prompts and one for decodes.

A batch is split in two: |decodes at its front|everything from the first chunk on|. Norms of q and k, their rotation
and the write into the cache are one kernel for both; then each part goes to its own `PagedImplementation`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from tokenmill.model.attention.batch import DeviceLens, ForwardBatch
from tokenmill.model.attention.context_step import ContextStep
from tokenmill.model.attention.protocol import AttentionLayer
from tokenmill.model.attention.tensor_kv import TokenMajorKV
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.model.kernels.triton.heads import place_heads


class Requests(msgspec.Struct, frozen=True):
    """Neighbouring requests of a batch: n requests with T tokens.

    Attributes:
        tokens: slice of their tokens in the batch.
        page_table: [n, P] int32.
        lens: their lengths on the device; `query_starts` counts from the first of their tokens.
        query_lens, context_lens: [n] int32 on the host; in a captured step, their upper bounds.
        sights: of their tokens, see `MediaTokens`.
        context: see `ForwardBatch`.
    """

    tokens: slice
    page_table: torch.Tensor
    lens: DeviceLens
    query_lens: np.ndarray
    context_lens: np.ndarray
    sights: torch.Tensor | None = None
    context: ContextStep | None = None


class PagedImplementation(Protocol):
    """Attention over the pages of requests, for one part of a batch.

    Attributes:
        takes_drafts: True if decodes in a graph may have several tokens; those past the last request belong to none.
    """

    takes_drafts: bool = True

    def plan(self, requests: Requests) -> Any:
        """Prepare the data shared by the layers of a step; passed to `attend`."""

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: Any,
        layer: AttentionLayer,
    ) -> None:
        """Attend q [T, num_heads, head_dim] to a layer's keys and values, and write output of the same shape.

        Args:
            memory: keys and values of the layer, [pages, page_size, kv_heads, head_dim] each.
        """

    def before_replay(self, context_lens: np.ndarray) -> bool:
        """Plan on the host before a captured step of n decodes is replayed; runs on the stream of steps.

        Args:
            context_lens: [n] int32 on the host, of the rows of the graph.

        Returns:
            True if copies from the host's memory were issued, which must end before the next call.
        """
        return False


class PagedPlan(msgspec.Struct, frozen=True):
    """The data shared by the layers of a step: places of the tokens, and the parts of the batch with their plans.

    Attributes:
        places: each token's row in the tables of angles, and its slot.
        rotary: tables of this step; None for those of each layer.
    """

    places: tuple[torch.Tensor, torch.Tensor]
    parts: tuple[tuple[PagedImplementation, slice, Any], ...]
    rotary: RotaryTables | None


class PagedAttention:
    """The `AttentionBackend` for GPUs, composed of implementations for prompts and decodes.

    Args:
        prompts: implementation for all requests from the first with several tokens on.
        decodes: implementation for requests with a single token.
        captured: implementation for decodes in CUDA graphs, whose plan serves all lengths; None for `decodes`.
        sees_spans: the tokens of one image see each other, see `AttentionSpec.spans_see_ahead`.

    Attributes:
        takes_drafts: `PagedImplementation.takes_drafts` of the one for graphs.
    """

    def __init__(
        self,
        kv: TokenMajorKV,
        prompts: PagedImplementation,
        decodes: PagedImplementation,
        captured: PagedImplementation | None = None,
        *,
        sees_spans: bool = False,
    ) -> None:
        self.kv = kv
        self._prompts = prompts
        self._decodes = decodes
        self._captured = captured or decodes
        self._sees_spans = sees_spans
        self.takes_drafts = self._captured.takes_drafts

    def in_graphs(self) -> PagedAttention:
        """Return a backend over the same memory that attends as in CUDA graphs."""
        return PagedAttention(self.kv, self._captured, self._captured, sees_spans=self._sees_spans)

    def before_replay(self, context_lens: np.ndarray) -> bool:
        """Plan the implementation for graphs before a replay."""
        return self._captured.before_replay(context_lens)

    def plan(self, batch: ForwardBatch) -> PagedPlan:
        """Split the batch into decodes and the rest, and plan each part."""
        lens = batch.lens or _lens_of(batch)
        is_chunk = batch.query_lens > 1
        num_decodes = int(is_chunk.argmax()) if is_chunk.any() else len(is_chunk)
        sights = batch.media.sights if batch.media is not None and self._sees_spans else None
        parts = []
        for implementation, first, end in (
            (self._decodes, 0, num_decodes),
            (self._prompts, num_decodes, len(is_chunk)),
        ):
            if first < end:
                requests = _part(batch, lens, sights, first, end)
                parts.append((implementation, requests.tokens, implementation.plan(requests)))
        turned, rotary = batch.positions if batch.turned is None else batch.turned, None
        angles = None if batch.media is None else batch.media.angles
        if angles is not None:
            rotary = RotaryTables(*angles.rotary.rows(angles.positions, angles.axes))
            turned = torch.arange(len(turned), device=turned.device)
        return PagedPlan((turned, batch.slots), tuple(parts), rotary)

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, plan: PagedPlan) -> torch.Tensor:
        """Norm, rotate and write the heads in one kernel, then attend part by part."""
        memory = self.kv.layer(layer.index)
        rotary = layer.rotary if plan.rotary is None else plan.rotary
        q = place_heads(qkv, layer.norms, rotary, plan.places, memory, layer.reads_only)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for implementation, tokens, own in plan.parts:
            implementation.attend(q[tokens], memory, output[tokens], own, layer)
        return output.flatten(1)


def _lens_of(batch: ForwardBatch) -> DeviceLens:
    """Copy a batch's lengths to its device."""
    device, lens = batch.token_ids.device, (batch.context_lens, batch.query_starts)
    return DeviceLens(*(torch.from_numpy(own).to(device) for own in lens))


def _part(batch: ForwardBatch, lens: DeviceLens, sights: torch.Tensor | None, first: int, end: int) -> Requests:
    tokens = slice(int(batch.query_starts[first]), int(batch.query_starts[end]))
    starts = lens.query_starts[first : end + 1]
    return Requests(
        tokens=tokens,
        page_table=batch.page_table[first:end],
        lens=DeviceLens(lens.context_lens[first:end], starts if tokens.start == 0 else starts - tokens.start),
        query_lens=batch.query_lens[first:end],
        context_lens=batch.context_lens[first:end],
        sights=None if sights is None else sights[tokens],
        context=batch.context,
    )
