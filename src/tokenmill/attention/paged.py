"""`PagedAttention`: attention on a GPU, put together from what attends to prompts and what attends to decodes.

A batch is parted in two: |decodes at its front|everything from the first chunk on|. Norms of q and k, their rotation
and the write into the cache are one kernel for both; then each part goes to its own `Attender`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tokenmill.attention.batch import DeviceLens, ForwardBatch
from tokenmill.attention.paged_memory import PagedMemory
from tokenmill.attention.protocol import AttentionSpec
from tokenmill.kernels.heads import HeadNorms, RotaryTables
from tokenmill.kernels.triton.heads import place_heads


@dataclass(frozen=True, slots=True)
class Requests:
    """Neighbouring requests of a batch: n requests with T tokens.

    Attributes:
        tokens: their tokens in the batch.
        page_table: [n, P] int32. context_lens: [n] int32. query_starts: [n + 1] int32, from 0 on; on the device.
        query_lens, held: [n] int32 on the host, tokens and context; in a captured step, the most that they may be.
    """

    tokens: slice
    page_table: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor
    query_lens: np.ndarray
    held: np.ndarray


class Attender(Protocol):
    """Attends to requests whose keys and values are in their pages.

    Attributes:
        name: of the backend that it stands for.
        is_capturable: a plan that was made once serves other lengths too: what CUDA graphs need.
    """

    name: str
    is_capturable: bool

    def plan(self, requests: Requests) -> Any:
        """Prepare what the layers of a step share; passed to `attend`."""

    def attend(
        self,
        q: torch.Tensor,
        layer: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: Any,
        window: int | None,
    ) -> None:
        """Attention of q [T, num_heads, head_dim] over a layer's keys and values, into output of the same shape.

        Args:
            layer: keys and values, [pages, page_size, kv_heads, head_dim] each.
        """


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What the layers of a step share: places of the tokens, and the parts of the batch with their plans."""

    rotary: RotaryTables
    places: tuple[torch.Tensor, torch.Tensor]
    parts: tuple[tuple[Attender, slice, Any], ...]


class PagedAttention:
    """See `AttentionBackend`.

    Args:
        decodes: for requests with a single token; None: they are treated as prompts of one token, so that a token's
            result does not depend on the chunk that it came in.
    """

    def __init__(self, spec: AttentionSpec, kv: PagedMemory, prompts: Attender, decodes: Attender | None) -> None:
        self.spec = spec
        self.kv = kv
        self._prompts = prompts
        self._decodes = decodes

    @property
    def name(self) -> str:
        """One backend, or the two of a hybrid."""
        names = dict.fromkeys((self._prompts.name, (self._decodes or self._prompts).name))
        return ",".join(names)

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs can hold a step of decodes."""
        return (self._decodes or self._prompts).is_capturable

    def plan(self, batch: ForwardBatch, rotary: RotaryTables) -> PagedPlan:
        """See `AttentionBackend.plan`."""
        lens = batch.lens or DeviceLens.of(batch)
        is_chunk = batch.query_lens > 1
        num_decodes = int(is_chunk.argmax()) if is_chunk.any() else len(is_chunk)
        if self._decodes is None:
            num_decodes = 0
        parts = []
        for attender, first, end in (
            (self._decodes, 0, num_decodes),
            (self._prompts, num_decodes, len(is_chunk)),
        ):
            if attender is not None and first < end:
                requests = _part(batch, lens, first, end)
                parts.append((attender, requests.tokens, attender.plan(requests)))
        return PagedPlan(rotary, (batch.positions, batch.slots), tuple(parts))

    def forward(
        self,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        layer: int,
        plan: PagedPlan,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        memory = self.kv.layer(layer)
        q = place_heads(qkv, norms, plan.rotary, plan.places, memory)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for attender, tokens, own in plan.parts:
            attender.attend(q[tokens], memory, output[tokens], own, window)
        return output.flatten(1)


def _part(batch: ForwardBatch, lens: DeviceLens, first: int, end: int) -> Requests:
    tokens = slice(int(batch.query_starts[first]), int(batch.query_starts[end]))
    starts = lens.query_starts[first : end + 1]
    return Requests(
        tokens=tokens,
        page_table=batch.page_table[first:end],
        context_lens=lens.context_lens[first:end],
        query_starts=starts if tokens.start == 0 else starts - tokens.start,
        query_lens=batch.query_lens[first:end],
        held=batch.context_lens[first:end],
    )
