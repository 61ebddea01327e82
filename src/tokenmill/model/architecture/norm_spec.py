"""A norm as plain frozen data."""

from __future__ import annotations

import msgspec


class NormSpec(msgspec.Struct, frozen=True):
    """An RMSNorm. `is_offset`: its weight is an offset from 1 (Gemma)."""

    eps: float
    is_offset: bool = False
