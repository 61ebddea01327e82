"""Attention by FlashInfer (Ye et al. 2025), if it is installed; it compiles its kernels with nvcc on first use.

Layers with sinks have a wrapper of another class, `SINK_WRAPPER`, whose `run` takes a number for each head, in the
units of scores, and the scale. The other wrappers have an argument `sinks` too, which only what the library has for
capability 10 (`trtllm-gen`, `cute-dsl`) looks at; FA2 and FA3 leave it out without a word.

Pages that lie wholly behind a layer's window are not listed, so it does not matter whose they are by now: scores depend
on how far a key is from its query, not on where both are.

    | not listed | not listed | ... seen by the first query | ... | last page |
                                            |<---- window ----->|
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from tokenmill.model.attention.paged import PagedImplementation, Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.kernels.stored_tensors import tensor_over

Lens = TypeVar("Lens", np.ndarray, torch.Tensor)

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
    """The requests of a step, and the library's plans for them by kind, made on first use."""

    requests: Requests
    by_kind: dict[Kind, Any] = msgspec.field(default_factory=dict)


class GraphPlan(msgspec.Struct, frozen=True):
    """The requests of a graph, its wrappers by kind, and the windows for which it has listed pages so far."""

    requests: Requests
    wrappers: dict[Kind, Any]
    listed: set[int | None] = msgspec.field(default_factory=set)


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

    def _first_pages(self, context_lens: Lens, query_lens: Lens | int, window: int | None) -> Lens:
        """Return the number of pages of each request that lie wholly behind a window, [n]."""
        behind = context_lens * 0 if window is None else (context_lens - query_lens + 1 - window).clip(min=0)
        return behind // self._page_size

    def _pages_of(
        self, context_lens: np.ndarray, query_lens: np.ndarray | int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the pages of each request begin [n + 1], and the tokens in each last page [n]; on the host."""
        held = -(-context_lens // self._page_size)
        counts = held - self._first_pages(context_lens, query_lens, window)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        last = (context_lens - (held - 1) * self._page_size).astype(np.int32)
        return torch.from_numpy(bounds), torch.from_numpy(last)

    def _places(
        self, requests: Requests, query_lens: torch.Tensor | int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return, on the device, where each request's pages begin in its row, end there, and begin in the list; [n]."""
        context_lens = requests.lens.context_lens
        held = (context_lens + self._page_size - 1) // self._page_size
        first = self._first_pages(context_lens, query_lens, window)
        counts = held - first
        return first, held, counts.cumsum(0) - counts

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
        """Keep the requests; what the library needs of them depends on a layer's window."""
        return FlashInferPlan(requests)

    def lists(self, requests: Requests, window: int | None) -> tuple[torch.Tensor, ...]:
        """Return the lists of the library's plans for a window.

        Returns:
            Where queries [n + 1] and pages [n + 1] of each request begin, the pages [m], tokens in each last page [n].
        """
        bounds, last = self._pages_of(requests.context_lens, requests.query_lens, window)
        starts = np.concatenate([[0], np.cumsum(requests.query_lens)]).astype(np.int32)
        # The used part of the table is put together on the device: a copy to it would wait for what it does.
        first, held, begins = self._places(requests, requests.lens.query_starts.diff(), window)
        row = torch.repeat_interleave(held - first, output_size=int(bounds[-1]))
        number = torch.arange(len(row), device=row.device) - (begins - first)[row]
        return torch.from_numpy(starts), bounds, requests.page_table[row, number], last

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
            plan.by_kind[kind] = self._planned(self.lists(plan.requests, kind.window), kind)
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

    It has a wrapper for each size and kind, over buffers that those of one window share. The graph lists the pages
    itself; before each replay the library plans on the host where each row's pages begin and which program takes which
    work.
    """

    takes_drafts = False

    def __init__(self, spec: AttentionSpec, page_size: int, dtype: str, device: str, library: Any) -> None:
        super().__init__(spec, page_size, dtype, device, library)
        self._by_rows: dict[int, dict[Kind, Any]] = {}
        self._workspace = torch.zeros(0, dtype=torch.uint8, device=device)
        self._starts, self._last = (torch.zeros(0, dtype=torch.int32, device=device) for _ in range(2))
        self._lists: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def plan(self, requests: Requests) -> GraphPlan:
        """Return the requests, with the wrappers of their number."""
        rows = len(requests.page_table)
        if rows > len(self._last):
            # The largest graph comes first, and runs once before it is captured.
            self._workspace = self._workspace.new_zeros(WORKSPACE_BYTES)
            self._starts, self._last = self._starts.new_zeros(rows + 1), self._last.new_zeros(rows)
        return GraphPlan(requests, self._by_rows.setdefault(rows, {}))

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: GraphPlan,
        layer: AttentionLayer,
    ) -> None:
        """Attend by the library's wrapper for layers of this kind, behind a list of the pages that it sees."""
        kind = Kind.of(layer)
        if kind.window not in plan.listed:
            self._list_pages(plan.requests, kind.window)
            plan.listed.add(kind.window)
        if kind not in plan.wrappers:
            plan.wrappers[kind] = self._wrapper(len(q), kind)
            self._plan_rows(plan.wrappers[kind], kind, np.ones(len(q), dtype=np.int32))
        self._run(plan.wrappers[kind], q, memory, output, layer)

    def before_replay(self, context_lens: np.ndarray) -> bool:
        """Plan every wrapper of this size on the host."""
        for kind, wrapper in self._by_rows[len(context_lens)].items():
            self._plan_rows(wrapper, kind, context_lens)
        return True

    def _list_pages(self, requests: Requests, window: int | None) -> None:
        """Write the pages that all rows see, one after the other, into the buffer of a window."""
        _, width = requests.page_table.shape
        if window not in self._lists:
            most = len(self._last)
            self._lists[window] = self._last.new_zeros(most + 1), self._last.new_zeros(most * width + 1)
        _, pages = self._lists[window]
        first, held, begins = self._places(requests, 1, window)
        number = torch.arange(width, device=held.device)
        place = (begins - first)[:, None] + number
        place = place.masked_fill_((number < first[:, None]) | (number >= held[:, None]), len(pages) - 1)
        pages.scatter_(0, place.flatten(), requests.page_table.flatten())

    def _plan_rows(self, wrapper: Any, kind: Kind, context_lens: np.ndarray) -> None:
        bounds, last = self._pages_of(context_lens, 1, kind.window)
        # No pages: those in the buffer are the graph's.
        arguments = (bounds, self._lists[kind.window][1][:0], last)
        if kind.has_sinks:
            starts = torch.arange(len(bounds), dtype=torch.int32)
            self._plan(wrapper, kind, (starts, *arguments), causal=True)
        else:
            self._plan(wrapper, kind, arguments)

    def _wrapper(self, rows: int, kind: Kind) -> Any:
        bounds, pages = self._lists[kind.window]
        lists = {"indptr": bounds[: rows + 1], "indices": pages, "last_page_len": self._last[:rows]}
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
