"""What reaches an engine from outside, as data: each call that changes what the scheduler will decide."""

from __future__ import annotations

import msgspec

from tokenmill.messages import AddRequest
from tokenmill.sampling_params import SamplingParams


class Event(msgspec.Struct, tag=True):
    """Base of all events; the class name is the tag."""


class Added(Event):
    """`Engine.add`; `status` is the value of a `RequestStatus`."""

    message: AddRequest
    status: str


class Extended(Event):
    """`Engine.extend`."""

    id: str
    token_ids: list[int]
    params: SamplingParams
    is_last: bool


class Woken(Event):
    """`Engine.wake`."""

    id: str


class Aborted(Event):
    """`Engine.abort`."""

    ids: list[str]


class CacheReset(Event):
    """`Engine.reset_prefix_cache`."""

    preempt_running: bool


class Paused(Event):
    """`Engine.pause` or `Engine.resume`."""

    is_paused: bool


AnyEvent = Added | Extended | Woken | Aborted | CacheReset | Paused
