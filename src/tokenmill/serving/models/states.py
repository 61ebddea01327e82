"""The states of a model of several, and which follows which.

unloaded ─ start ─> loading ─ ready ─> ready ─ room is needed ─> draining ─ idle ─> unloading ─ exit ─> unloaded
                       │                 │ <─ no longer ────────────┘                  ^
                       │                 └─ idle ──────────────────────────────────────┘
                       └─ dies ─> failed <─ dies ─┘      failed ─ start ─> loading

ready or draining, and idle ─ less room is needed ─> falling asleep ─ has given memory back ─> sleeping ─ turn ─> ready
                                                          └─ would not ─> ready                   └─> unloading
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class ModelState(StrEnum):
    """The state of a model.

    A draining model finishes what it has begun and takes nothing new; an unloading one has been told to exit, and its
    memory is not free before it has. A sleeping one has its processes, and its weights where these are mapped from
    files, but the memory of its KV is another's.
    """

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FALLING_ASLEEP = "falling_asleep"
    SLEEPING = "sleeping"
    UNLOADING = "unloading"
    FAILED = "failed"


NEXT: Mapping[ModelState, frozenset[ModelState]] = MappingProxyType(
    {
        ModelState.UNLOADED: frozenset({ModelState.LOADING}),
        ModelState.LOADING: frozenset({ModelState.READY, ModelState.UNLOADING, ModelState.FAILED}),
        ModelState.READY: frozenset(
            {ModelState.DRAINING, ModelState.FALLING_ASLEEP, ModelState.UNLOADING, ModelState.FAILED}
        ),
        ModelState.DRAINING: frozenset(
            {ModelState.READY, ModelState.FALLING_ASLEEP, ModelState.UNLOADING, ModelState.FAILED}
        ),
        ModelState.FALLING_ASLEEP: frozenset({ModelState.SLEEPING, ModelState.READY, ModelState.FAILED}),
        ModelState.SLEEPING: frozenset({ModelState.READY, ModelState.UNLOADING, ModelState.FAILED}),
        ModelState.UNLOADING: frozenset({ModelState.UNLOADED}),
        ModelState.FAILED: frozenset({ModelState.LOADING, ModelState.UNLOADED}),
    }
)
# States in which a model's server can tell of itself, and serves or could at once.
SERVING = frozenset({ModelState.READY, ModelState.DRAINING, ModelState.SLEEPING})
# States in which a model's processes exist, and so some of its memory is taken.
RESIDENT = SERVING | {ModelState.LOADING, ModelState.FALLING_ASLEEP, ModelState.UNLOADING}
