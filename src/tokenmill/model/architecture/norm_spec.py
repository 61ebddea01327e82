"""A norm as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMSNorm. `is_offset`: its weight is an offset from 1 (Gemma)."""

    eps: float
    is_offset: bool = False
