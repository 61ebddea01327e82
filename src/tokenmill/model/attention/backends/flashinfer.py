"""Attention by FlashInfer (Ye et al. 2025), if it is installed; it compiles its kernels with nvcc on first use.

Layers with sinks have a wrapper of another class, `SINK_WRAPPER`, whose `run` takes a number for each head, in the
units of scores, and the scale. The other wrappers have an argument `sinks` too, which only what the library has for
capability 10 (`trtllm-gen`, `cute-dsl`) looks at; FA2 and FA3 leave it out without a word.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from tokenmill.model.attention.paged import PagedImplementation, Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.kernels.stored_tensors import tensor_over

WORKSPACE_BYTES = 128 << 20
SINK_WRAPPER = "BatchAttentionWithAttentionSinkWrapper"


class Kind(msgspec.Struct, frozen=True):
    """The layers that one plan serves: those of a window and a scale, all of them with sinks or none."""

    window: int | None
    scale: float
    has_sinks: bool

    @classmethod
    def of(cls, layer: AttentionLayer) -> Kind:
        """Return the kind of a layer."""
        return cls(layer.window, layer.scale, layer.sinks is not None)

    @property
    def num_behind(self) -> int:
        """Tokens that one sees before itself, in the library's words: -1 for all."""
        return -1 if self.window is None else self.window - 1


class FlashInferPlan(msgspec.Struct, frozen=True):
    """The shared arguments of the library's plans in a step, and those plans by kind, made on first use.

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
        self._sinks: dict[AttentionLayer, torch.Tensor] = {}

    def _pages_of(self, context_lens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the pages of each request begin [n + 1], and the tokens in each last page [n]; on the host."""
        counts = -(-context_lens // self._page_size)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        last = (context_lens - (counts - 1) * self._page_size).astype(np.int32)
        return torch.from_numpy(bounds), torch.from_numpy(last)

    def _plan(self, wrapper: Any, kind: Kind, arguments: tuple[torch.Tensor, ...], **options: Any) -> None:
        wrapper.plan(
            *arguments,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            self._spec.head_dim,
            self._page_size,
            sm_scale=kind.scale,
            window_left=kind.num_behind,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            **options,
        )

    def _wrapper_with_sinks(self, workspace: torch.Tensor, kind: Kind, **options: Any) -> Any:
        """Make a wrapper that is planned as one for prompts; it compiles for its window and types here."""
        return getattr(self._library, SINK_WRAPPER)(
            workspace,
            "NHD",
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            head_dim_qk=self._spec.head_dim,
            head_dim_vo=self._spec.head_dim,
            window_left=kind.num_behind,
            **options,
        )

    def _run(
        self,
        wrapper: Any,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        layer: AttentionLayer,
    ) -> None:
        if layer.sinks is None:
            wrapper.run(q, memory, out=output)
            return
        if layer not in self._sinks:
            # Its kernels read float32. A graph reads what the run before its capture has left here.
            self._sinks[layer] = tensor_over(layer.sinks).float()
        wrapper.run(q, memory, self._sinks[layer], layer.scale, out=output)


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
        """Attend by the library, after its first plan for layers of this kind."""
        kind = Kind.of(layer)
        if kind not in plan.by_kind:
            plan.by_kind[kind] = self._planned(plan.arguments, kind)
        self._run(plan.by_kind[kind], q, memory, output, layer)

    def _planned(self, arguments: tuple[torch.Tensor, ...], kind: Kind) -> Any:
        if kind not in self._wrappers:
            # One of its own for each kind: a plan lives in the workspace.
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            if kind.has_sinks:
                self._wrappers[kind] = self._wrapper_with_sinks(workspace, kind)
            else:
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
        empty = torch.zeros(0, dtype=torch.int32, device=device)
        self._starts, self._bounds, self._pages, self._last = empty, empty, empty, empty

    def plan(self, requests: Requests) -> dict[Kind, Any]:
        """Write the pages of all rows one after the other into the buffer, and return the wrappers."""
        rows, width = requests.page_table.shape
        if rows > len(self._last):
            # The largest graph comes first, and runs once before it is captured.
            self._workspace = self._workspace.new_zeros(WORKSPACE_BYTES)
            self._starts, self._bounds = (self._bounds.new_zeros(rows + 1) for _ in range(2))
            self._last = self._last.new_zeros(rows)
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
        """Attend by the library's wrapper for layers of this kind."""
        kind = Kind.of(layer)
        if kind not in plan:
            plan[kind] = self._wrapper(len(q), kind)
            self._plan_rows(plan[kind], kind, np.ones(len(q), dtype=np.int32))
        self._run(plan[kind], q, memory, output, layer)

    def before_replay(self, context_lens: np.ndarray) -> bool:
        """Plan every wrapper of this size on the host."""
        for kind, wrapper in self._by_rows[len(context_lens)].items():
            self._plan_rows(wrapper, kind, context_lens)
        return True

    def _plan_rows(self, wrapper: Any, kind: Kind, context_lens: np.ndarray) -> None:
        bounds, last = self._pages_of(context_lens)
        # No pages: those in the buffer are the graph's.
        arguments = (bounds, self._pages[:0], last)
        if kind.has_sinks:
            starts = torch.arange(len(bounds), dtype=torch.int32)
            self._plan(wrapper, kind, (starts, *arguments), causal=True)
        else:
            self._plan(wrapper, kind, arguments)

    def _wrapper(self, rows: int, kind: Kind) -> Any:
        lists = {"indptr": self._bounds[: rows + 1], "indices": self._pages, "last_page_len": self._last[:rows]}
        if kind.has_sinks:
            return self._wrapper_with_sinks(
                self._workspace,
                kind,
                use_cuda_graph=True,
                # FA3 does not split contexts; the library takes FA2 for decodes without sinks, too.
                backend="fa2",
                qo_indptr_buf=self._starts[: rows + 1],
                **{f"paged_kv_{name}_buf": own for name, own in lists.items()},
            )
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            # Other kernels know groups of a few sizes only.
            use_tensor_cores=self._spec.num_heads // self._spec.num_kv_heads >= 4,
            **{f"paged_kv_{name}_buffer": own for name, own in lists.items()},
        )
