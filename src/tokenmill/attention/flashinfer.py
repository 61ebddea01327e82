"""Attention by FlashInfer (Ye et al. 2025), where it is installed; it compiles its kernels with nvcc on first use."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tokenmill.attention.paged import Requests
from tokenmill.attention.protocol import AttentionSpec

WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """What the library's plans of a step share, and those plans by window, made when the first layer with it asks.

    Attributes:
        arguments: where queries and pages of each request begin [n + 1], the pages [m], tokens in each last page [n].
    """

    arguments: tuple[torch.Tensor, ...]
    by_window: dict[int | None, Any] = field(default_factory=dict)


class FlashInferAttender:
    """See `Attender`; for prompts or for decodes: it holds the plans of one part of a batch.

    Plans are made on the host, step by step, so graphs cannot hold them.

    Args:
        library: the module `flashinfer`, or what stands in for it in a test.
    """

    name = "flashinfer"
    is_capturable = False

    def __init__(self, spec: AttentionSpec, page_size: int, dtype: torch.dtype, device: str, library: Any) -> None:
        self._spec = spec
        self._page_size = page_size
        self._dtype = dtype
        self._device = device
        self._library = library
        self._wrappers: dict[int | None, Any] = {}

    def plan(self, requests: Requests) -> FlashInferPlan:
        """See `Attender.plan`."""
        counts = -(-requests.held // self._page_size)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(requests.query_lens)]).astype(np.int32)
        last = (requests.held - (counts - 1) * self._page_size).astype(np.int32)
        # Entry i of the table's used part: counted by its place in the flat table, so that the device need not search.
        number = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts)
        place = np.repeat(np.arange(len(counts)), counts) * requests.page_table.shape[1] + number
        flat = requests.page_table.flatten()
        pages = flat.index_select(0, torch.from_numpy(place).to(flat.device))
        return FlashInferPlan((torch.from_numpy(starts), torch.from_numpy(bounds), pages, torch.from_numpy(last)))

    def attend(
        self,
        q: torch.Tensor,
        layer: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: FlashInferPlan,
        window: int | None,
    ) -> None:
        """See `Attender.attend`."""
        if window not in plan.by_window:
            plan.by_window[window] = self._planned(plan.arguments, window)
        plan.by_window[window].run(q, layer, out=output)

    def _planned(self, arguments: tuple[torch.Tensor, ...], window: int | None) -> Any:
        if window not in self._wrappers:
            # One of its own for each window: a plan lives in the workspace.
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._wrappers[window] = self._library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._wrappers[window].plan(
            *arguments,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            self._spec.head_dim,
            self._page_size,
            causal=True,
            sm_scale=self._spec.scale,
            window_left=-1 if window is None else window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._wrappers[window]


def find_flashinfer() -> Any | None:
    """The library; None if it is not installed."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError:
        return None
