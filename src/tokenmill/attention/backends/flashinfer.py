"""Attention by FlashInfer (Ye et al. 2025), where it is installed; it compiles its kernels with nvcc on first use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tokenmill.attention.paged import Requests
from tokenmill.attention.protocol import AttentionLayer, AttentionSpec

WORKSPACE_BYTES = 128 << 20

Kind = tuple[int | None, float]
"""Window and scale of a layer."""


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """What the library's plans of a step share, and those plans by window and scale, made when a first layer asks.

    Attributes:
        arguments: where queries and pages of each request begin [n + 1], the pages [m], tokens in each last page [n].
    """

    arguments: tuple[torch.Tensor, ...]
    by_kind: dict[Kind, Any] = field(default_factory=dict)


class FlashInferAttention:
    """See `PagedImplementation`; for prompts or for decodes: it holds the plans of one part of a batch.

    Plans are made on the host, step by step, so graphs cannot hold them: a replay would have to be preceded by a plan
    of its lengths, which the runner has no call for.

    Args:
        library: the module `flashinfer`, or what stands in for it in a test.
    """

    def __init__(self, spec: AttentionSpec, page_size: int, dtype: torch.dtype, device: str, library: Any) -> None:
        self._spec = spec
        self._page_size = page_size
        self._dtype = dtype
        self._device = device
        self._library = library
        self._wrappers: dict[Kind, Any] = {}

    def plan(self, requests: Requests) -> FlashInferPlan:
        """See `PagedImplementation.plan`."""
        counts = -(-requests.context_lens // self._page_size)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(requests.query_lens)]).astype(np.int32)
        last = (requests.context_lens - (counts - 1) * self._page_size).astype(np.int32)
        # The used part of the table is put together on the device: a copy to it would wait for what it does.
        held = (requests.lens.context_lens + self._page_size - 1) // self._page_size
        row = torch.repeat_interleave(held, output_size=int(bounds[-1]))
        number = torch.arange(len(row), device=row.device) - (held.cumsum(0) - held)[row]
        pages = requests.page_table[row, number]
        return FlashInferPlan((torch.from_numpy(starts), torch.from_numpy(bounds), pages, torch.from_numpy(last)))

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: FlashInferPlan,
        layer: AttentionLayer,
    ) -> None:
        """See `PagedImplementation.attend`."""
        kind = (layer.window, layer.scale)
        if kind not in plan.by_kind:
            plan.by_kind[kind] = self._planned(plan.arguments, kind)
        plan.by_kind[kind].run(q, memory, out=output)

    def _planned(self, arguments: tuple[torch.Tensor, ...], kind: Kind) -> Any:
        window, scale = kind
        if kind not in self._wrappers:
            # One of its own for each kind: a plan lives in the workspace.
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._wrappers[kind] = self._library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._wrappers[kind].plan(
            *arguments,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            self._spec.head_dim,
            self._page_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if window is None else window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._wrappers[kind]
