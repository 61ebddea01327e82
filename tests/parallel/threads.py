"""Ranks as threads of one process, over the memory that processes would share: a group of any size in milliseconds."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.paging import make_attention
from tokenmill.attention.protocol import AttentionBackend
from tokenmill.kernels.protocol import Kernels
from tokenmill.models.native_decoder import in_one_call
from tokenmill.parallel.follower import Follower
from tokenmill.parallel.layout import Layout, StepShape
from tokenmill.parallel.messages import End
from tokenmill.parallel.model import RankedModel
from tokenmill.parallel.shard import Shard
from tokenmill.parallel.shared_memory import SharedMemory
from tokenmill.weights.checkpoint import read_architecture
from tokenmill.weights.loader import plan_model

TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Form:
    """What a model runs on.

    Attributes:
        make: makes the kernels of a rank.
    """

    make: Callable[[], Kernels]
    attention: str = "native"
    kv_dtype: torch.dtype | None = None

    def attend(self, decoder, kernels: Kernels, num_pages: int) -> AttentionBackend:
        """The attention of a decoder."""
        native = getattr(kernels, "native", None)
        spec, dtype = decoder.attention_spec, kernels.dtype
        return make_attention(self.attention, spec, num_pages, 16, dtype, kv_dtype=self.kv_dtype, native=native)


@contextlib.contextmanager
def memories(folder: Path, size: int, step: StepShape) -> Iterator[list[SharedMemory]]:
    """What each of `size` ranks has of the memory that they share."""
    layout = Layout(read_architecture(folder), step, size)
    descriptor = os.memfd_create("test-ranks")
    os.ftruncate(descriptor, layout.num_bytes)
    try:
        shared = [SharedMemory(descriptor, layout, Shard(rank, size)) for rank in range(size)]
        for memory in shared:
            memory.join([], TIMEOUT, False)
        yield shared
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def ranks(
    folder: Path, size: int, form: Form, num_pages: int, step: StepShape
) -> Iterator[tuple[RankedModel, AttentionBackend]]:
    """Rank 0's model and attention; the others follow until the end."""
    with memories(folder, size, step) as shared:
        parts = []
        for memory in shared:
            kernels = form.make()
            decoder = plan_model(folder, read_architecture(folder), kernels, collective=memory).load()
            attention = form.attend(decoder, kernels, num_pages)
            parts.append((in_one_call(decoder, attention), attention, memory, kernels.dtype))
        (own, attention, memory, _), *others = parts
        threads = [threading.Thread(target=Follower(*part, iter(())).run, daemon=True) for part in others]
        for thread in threads:
            thread.start()
        try:
            yield RankedModel(own, memory), attention
        finally:
            if not memory.is_broken:
                memory.post(End())
            for thread in threads:
                thread.join(TIMEOUT)
            assert not any(thread.is_alive() for thread in threads), "a rank has not ended"
