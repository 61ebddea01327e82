"""`victims`: choose the models that have to go, or to sleep, before one more can be loaded. It changes nothing.

    missing = what the model takes - (free + what will be free in a moment)

    idle models, the least recently used first:    |leave      |sleep         |stay        |
                                                    as few as   as few as then
                                                    possible    possible

Sleep costs a model the prefixes that are not stored elsewhere, and nothing when it wakes up; so many sleep before one
leaves. Where even all idle ones are too little, busy ones are chosen as well, those first that were loaded first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from tokenmill.serving.models.records import ModelRecord
from tokenmill.serving.models.states import SERVING


class Victim(msgspec.Struct, frozen=True):
    """A model that makes room; `sleeps`: by sleeping, else it leaves."""

    model: ModelRecord
    sleeps: bool = False


def victims(wanted: ModelRecord, models: Sequence[ModelRecord], free: int, is_short: bool) -> list[Victim]:
    """Return the models that make room for a model; empty: none has to, or can.

    Args:
        models: all of them.
        free: bytes of the budget that nobody takes.
        is_short: the machine has less memory left than the model takes; somebody else uses it.
    """
    there = [model for model in models if model is not wanted and model.state in SERVING]
    excluded = [Victim(model) for model in there if wanted.excludes(model)]
    others = [model for model in there if not wanted.excludes(model) and not model.rules.pinned]
    others.sort(key=lambda model: (not model.is_idle, model.used if model.is_idle else model.begun))
    soon_free = sum(model.soon_free for model in models) + sum(victim.model.num_bytes for victim in excluded)
    missing = wanted.needs_bytes - free - soon_free
    chosen = excluded if missing <= 0 else [*excluded, *_makes_room(others, missing)]
    # The ledger has room, but the machine has not.
    if is_short and not chosen and others and not any(model.is_going for model in models):
        return [Victim(others[0])]
    return chosen


def _makes_room(others: Sequence[ModelRecord], missing: int) -> list[Victim]:
    """Return the first of these, idle ones in front, that free so many bytes; all of them if they do not."""
    idle = [model for model in others if model.is_idle]
    for count in range(len(idle) + 1):
        left = missing - sum(model.num_bytes for model in idle[:count])
        sleepers = _sleepers(idle[count:], left)
        if sleepers is not None:
            return [*(Victim(model) for model in idle[:count]), *sleepers]
    sums = itertools.accumulate(model.num_bytes for model in others)
    count = next((number for number, freed in enumerate(sums, 1) if freed >= missing), len(others))
    return [Victim(model) for model in others[:count]]


def _sleepers(idle: Sequence[ModelRecord], missing: int) -> list[Victim] | None:
    """Return the first of these that free so many bytes asleep; None: all of them are too little."""
    chosen: list[Victim] = []
    for model in idle:
        if missing <= 0:
            break
        if model.sleep_frees > 0:
            chosen.append(Victim(model, sleeps=True))
            missing -= model.sleep_frees
    return chosen if missing <= 0 else None
