"""Which attention backend runs, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenmill.attention.cpu import CpuAttention
from tokenmill.attention.kv_pool import KVPool
from tokenmill.attention.native import NativeAttention, unsuitable
from tokenmill.attention.packed_kv_pool import PackedKVPool
from tokenmill.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill import _native

BACKENDS = ("reference", "cpu", "native")


def select(
    name: str,
    device: str,
    spec: AttentionSpec,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype | None = None,
    native: _native.Kernels | None = None,
) -> tuple[AttentionBackend, str]:
    """Make the attention backend with its KV memory.

    Args:
        name: one of `BACKENDS`, or `auto`.
        num_pages: pages of the pool, the reserved page 0 among them.
        dtype: of the model.
        kv_dtype: of the KV memory, if it is another: int8.
        native: the native kernels, where the model runs on them.

    Returns:
        The backend, and a clause that says why it was taken.

    Raises:
        InvalidConfig: no such backend, or not on this device or for this model.
    """
    if name not in (*BACKENDS, "auto"):
        raise InvalidConfig(f"--attention-backend {name} is unknown; choose one of auto, {', '.join(BACKENDS)}")
    on_cpu = torch.device(device).type == "cpu"
    if name == "cpu" and not on_cpu:
        raise InvalidConfig(f"--attention-backend cpu does not run on device {device}; use reference or auto")
    obstacle = _obstacle(native, spec, page_size, dtype)
    if native is not None and obstacle is None and name in ("auto", "native"):
        pool = PackedKVPool(spec, num_pages, page_size, kv_dtype or dtype)
        return NativeAttention(spec, pool, native), f"packed KV, {native.isa}"
    if name == "native":
        raise InvalidConfig(f"--attention-backend native: {obstacle}")
    if kv_dtype not in (None, dtype):
        raise InvalidConfig(
            f"--kv-cache-dtype needs the native attention: {obstacle or 'another backend is asked for'}"
        )
    chosen, reason = name, "asked for"
    if name == "auto":
        chosen, reason = ("cpu", f"batched torch: {obstacle}") if on_cpu else ("reference", "runs on any device")
    plain = KVPool(spec, num_pages, page_size, dtype, device)
    return (CpuAttention(spec, plain) if chosen == "cpu" else ReferenceAttention(spec, plain)), reason


def _obstacle(native: _native.Kernels | None, spec: AttentionSpec, page_size: int, dtype: torch.dtype) -> str | None:
    """Why the native attention cannot serve; None: it can."""
    reason = unsuitable(spec, page_size, dtype)
    return "the model does not run on native kernels" if reason is None and native is None else reason
