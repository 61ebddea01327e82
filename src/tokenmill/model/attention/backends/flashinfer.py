"""Attention by FlashInfer (Ye et al. 2025), if it is installed; it compiles its kernels with nvcc on first use."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from tokenmill.model.attention.paged import PagedImplementation, Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec

WORKSPACE_BYTES = 128 << 20

Kind = tuple[int | None, float]
"""Window and scale of a layer."""


class FlashInferPlan(msgspec.Struct, frozen=True):
    """The shared arguments of the library's plans in a step, and those plans by window and scale, made on first use.

    Attributes:
        arguments: where queries and pages of each request begin [n + 1], the pages [m], tokens in each last page [n].
    """

    arguments: tuple[torch.Tensor, ...]
    by_kind: dict[Kind, Any] = msgspec.field(default_factory=dict)


class _FlashInfer(PagedImplementation):
    """The common base of both uses of the library.

    Args:
        library: the module `flashinfer`, or a stand-in for it in a test.
    """

    def __init__(self, spec: AttentionSpec, page_size: int, dtype: str, device: str, library: Any) -> None:
        self._spec = spec
        self._page_size = page_size
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = device
        self._library = library

    def _pages_of(self, context_lens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the pages of each request begin [n + 1], and the tokens in each last page [n]; on the host."""
        counts = -(-context_lens // self._page_size)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        last = (context_lens - (counts - 1) * self._page_size).astype(np.int32)
        return torch.from_numpy(bounds), torch.from_numpy(last)

    def _plan(self, wrapper: Any, kind: Kind, arguments: tuple[torch.Tensor, ...], **options: Any) -> None:
        window, scale = kind
        wrapper.plan(
            *arguments,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            self._spec.head_dim,
            self._page_size,
            sm_scale=scale,
            window_left=-1 if window is None else window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            **options,
        )


class FlashInferAttention(_FlashInfer):
    """A `PagedImplementation` for prompts or for decodes, with the plans of one part of a batch.

    Plans are made on the host in each step.
    """

    def __init__(self, spec: AttentionSpec, page_size: int, dtype: str, device: str, library: Any) -> None:
        super().__init__(spec, page_size, dtype, device, library)
        self._wrappers: dict[Kind, Any] = {}

    def plan(self, requests: Requests) -> FlashInferPlan:
        """List queries and pages of the requests for the library."""
        bounds, last = self._pages_of(requests.context_lens)
        starts = np.concatenate([[0], np.cumsum(requests.query_lens)]).astype(np.int32)
        # The used part of the table is put together on the device: a copy to it would wait for what it does.
        held = (requests.lens.context_lens + self._page_size - 1) // self._page_size
        row = torch.repeat_interleave(held, output_size=int(bounds[-1]))
        number = torch.arange(len(row), device=row.device) - (held.cumsum(0) - held)[row]
        pages = requests.page_table[row, number]
        return FlashInferPlan((torch.from_numpy(starts), bounds, pages, last))

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: FlashInferPlan,
        layer: AttentionLayer,
    ) -> None:
        """Attend by the library, after its first plan for this window and scale."""
        kind = (layer.window, layer.scale)
        if kind not in plan.by_kind:
            plan.by_kind[kind] = self._planned(plan.arguments, kind)
        plan.by_kind[kind].run(q, memory, out=output)

    def _planned(self, arguments: tuple[torch.Tensor, ...], kind: Kind) -> Any:
        if kind not in self._wrappers:
            # One of its own for each kind: a plan lives in the workspace.
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._wrappers[kind] = self._library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._plan(self._wrappers[kind], kind, arguments, causal=True)
        return self._wrappers[kind]


class FlashInferGraphs(_FlashInfer):
    """A `PagedImplementation` for decodes in CUDA graphs.

    It has a wrapper for each size and kind, over shared buffers. The graph lists the pages itself; before each replay
    the library plans on the host where each row's pages begin and which program takes which work.
    """

    takes_drafts = False

    def __init__(self, spec: AttentionSpec, page_size: int, dtype: str, device: str, library: Any) -> None:
        super().__init__(spec, page_size, dtype, device, library)
        self._by_rows: dict[int, dict[Kind, Any]] = {}
        self._workspace = torch.zeros(0, dtype=torch.uint8, device=device)
        self._bounds, self._pages, self._last = (torch.zeros(0, dtype=torch.int32, device=device) for _ in range(3))

    def plan(self, requests: Requests) -> dict[Kind, Any]:
        """Write the pages of all rows one after the other into the buffer, and return the wrappers."""
        rows, width = requests.page_table.shape
        if rows > len(self._last):
            # The largest graph comes first, and runs once before it is captured.
            self._workspace = self._workspace.new_zeros(WORKSPACE_BYTES)
            self._bounds, self._last = self._bounds.new_zeros(rows + 1), self._last.new_zeros(rows)
            self._pages = self._pages.new_zeros(rows * width + 1)
        held = (requests.lens.context_lens + self._page_size - 1) // self._page_size
        number = torch.arange(width, device=held.device)
        place = (held.cumsum(0) - held)[:, None] + number
        place = place.masked_fill_(number >= held[:, None], len(self._pages) - 1)
        self._pages.scatter_(0, place.flatten(), requests.page_table.flatten())
        return self._by_rows.setdefault(rows, {})

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: dict[Kind, Any],
        layer: AttentionLayer,
    ) -> None:
        """Attend by the library's wrapper for this window and scale."""
        kind = (layer.window, layer.scale)
        if kind not in plan:
            plan[kind] = self._wrapper(len(q))
            self._plan_rows(plan[kind], kind, np.ones(len(q), dtype=np.int32))
        plan[kind].run(q, memory, out=output)

    def before_replay(self, context_lens: np.ndarray) -> bool:
        """Plan every wrapper of this size on the host."""
        for kind, wrapper in self._by_rows[len(context_lens)].items():
            self._plan_rows(wrapper, kind, context_lens)
        return True

    def _plan_rows(self, wrapper: Any, kind: Kind, context_lens: np.ndarray) -> None:
        bounds, last = self._pages_of(context_lens)
        # No pages: those in the buffer are the graph's.
        self._plan(wrapper, kind, (bounds, self._pages[:0], last))

    def _wrapper(self, rows: int) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            # Other kernels know groups of a few sizes only.
            use_tensor_cores=self._spec.num_heads // self._spec.num_kv_heads >= 4,
            paged_kv_indptr_buffer=self._bounds[: rows + 1],
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=self._last[:rows],
        )
