"""Layout of the memory that ranks share: all of them derive it from the same numbers."""

from __future__ import annotations

import mmap

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.sharding.shard import MOST_RANKS

SLOTS = 4
"""Messages in the ring."""
NOTE_BYTES = 1024
"""Bytes of the note that each rank writes for the others while it starts and when it gives up."""
SIGNAL_BYTES = 4096
# Rows of a native pass are padded to an odd number of cache lines of 32 numbers each (native/forward_pass.cpp); it has
# up to four arrays of bfloat16 in two rooms for float32.
PADDING = 96
LOGITS_BYTES = 256 << 20
MOST_HEAD_ROWS = 4096
# What a message takes besides its arrays.
MESSAGE_BYTES = 1 << 16


class StepShape(msgspec.Struct, frozen=True):
    """The largest step of an engine: tokens, requests, and pages of a request."""

    tokens: int
    requests: int
    pages: int


class Layout:
    """Offsets in bytes of the parts of shared memory; `head_rows` and `num_bytes` are sizes.

        |signals|notes|ring of messages|two rooms|inputs of the head|logits|best tokens and their logits|hidden states|

    The last part holds what another stage has brought; a single stage has none.

    Attributes:
        head_rows: rows that the head takes at a time.
        num_bytes: size of all. Parts that a step does not touch take no memory.
    """

    def __init__(self, architecture: Architecture, step: StepShape, size: int, num_stages: int = 1) -> None:
        self.size = size
        self.hidden_size, self.vocab_size = architecture.hidden_size, architecture.vocab_size
        self.head_rows = max(1, min(MOST_HEAD_ROWS, LOGITS_BYTES // (4 * self.vocab_size)))
        self.slot_bytes = MESSAGE_BYTES + 64 * step.tokens + 4 * step.requests * (step.pages + 8)
        widest = max(_width(layer, self.hidden_size) for layer in architecture.layers)
        self.room_bytes = _whole_pages(step.tokens * (widest + PADDING) * 4)
        self.num_bytes = 0
        self.signals = self._take(SIGNAL_BYTES)
        self.notes = self._take(MOST_RANKS * NOTE_BYTES)
        self.ring = self._take(SLOTS * self.slot_bytes)
        self.rooms = self._take(2 * self.room_bytes)
        self.inputs = self._take(self.head_rows * self.hidden_size * 4)
        self.logits = self._take(self.head_rows * self.vocab_size * 4)
        self.ids = self._take(size * self.head_rows * 8)
        self.values = self._take(size * self.head_rows * 4)
        self.hidden = self._take(step.tokens * self.hidden_size * 4 if num_stages > 1 else 0)

    def _take(self, num_bytes: int) -> int:
        start = self.num_bytes
        self.num_bytes += _whole_pages(num_bytes)
        return start


def _width(layer: LayerSpec, hidden_size: int) -> int:
    """Return the most numbers of a token that ranks put together at a time."""
    outputs = hidden_size * (layer.mlp.experts_per_token if isinstance(layer.mlp, MoeSpec) else 1)
    assert layer.attention is not None, "ranks share no recurrences"
    return max(layer.attention.q_size, layer.mlp.size, outputs)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
