"""Which attention backend runs, and why."""

from __future__ import annotations

import torch

from tokenmill.attention.cpu import CpuAttention
from tokenmill.attention.kv_pool import KVPool
from tokenmill.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.errors import InvalidConfig

BACKENDS = ("reference", "cpu")


def select(
    name: str, device: str, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype
) -> tuple[AttentionBackend, str]:
    """Make the attention backend with its KV memory.

    Args:
        name: one of `BACKENDS`, or `auto`.
        num_pages: pages of the pool, the reserved page 0 among them.

    Returns:
        The backend, and a clause that says why it was taken.

    Raises:
        InvalidConfig: no such backend, or not on this device.
    """
    if name not in (*BACKENDS, "auto"):
        raise InvalidConfig(f"--attention-backend {name} is unknown; choose one of auto, {', '.join(BACKENDS)}")
    on_cpu = torch.device(device).type == "cpu"
    if name == "cpu" and not on_cpu:
        raise InvalidConfig(f"--attention-backend cpu does not run on device {device}; use reference or auto")
    chosen, reason = name, "asked for"
    if name == "auto":
        chosen, reason = ("cpu", "batched torch for CPUs") if on_cpu else ("reference", "runs on any device")
    pool = KVPool(spec, num_pages, page_size, dtype, device)
    return (CpuAttention(spec, pool) if chosen == "cpu" else ReferenceAttention(spec, pool)), reason
