"""The states of a model of several, and which follows which.

unloaded ─ start ─> loading ─ ready ─> ready ─ room is needed ─> draining ─ idle ─> unloading ─ exit ─> unloaded
                       │                 │ <─ no longer ────────────┘                  ^
                       │                 └─ idle ──────────────────────────────────────┘
                       └─ dies ─> failed <─ dies ─┘      failed ─ start ─> loading
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class ModelState(StrEnum):
    """The state of a model.

    A draining model finishes what it has begun and takes nothing new; an unloading one has been told to exit, and its
    memory is not free before it has.
    """

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADING = "unloading"
    FAILED = "failed"


NEXT: Mapping[ModelState, frozenset[ModelState]] = MappingProxyType(
    {
        ModelState.UNLOADED: frozenset({ModelState.LOADING}),
        ModelState.LOADING: frozenset({ModelState.READY, ModelState.UNLOADING, ModelState.FAILED}),
        ModelState.READY: frozenset({ModelState.DRAINING, ModelState.UNLOADING, ModelState.FAILED}),
        ModelState.DRAINING: frozenset({ModelState.READY, ModelState.UNLOADING, ModelState.FAILED}),
        ModelState.UNLOADING: frozenset({ModelState.UNLOADED}),
        ModelState.FAILED: frozenset({ModelState.LOADING, ModelState.UNLOADED}),
    }
)
# States in which a model's processes exist, and so its memory is taken.
RESIDENT = frozenset({ModelState.LOADING, ModelState.READY, ModelState.DRAINING, ModelState.UNLOADING})
