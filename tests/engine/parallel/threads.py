"""Ranks as threads of one process, over the memory that processes would share: a group of any size in milliseconds."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tests.paging import make_attention
from tokenmill.engine.parallel.context import ContextModel, SharedContext
from tokenmill.engine.parallel.layout import Layout, StepShape
from tokenmill.engine.parallel.messages import End
from tokenmill.engine.parallel.model import PartialModel, RankedModel
from tokenmill.engine.parallel.pipeline.chain import FirstStage, LaterStage, StageListener, connect
from tokenmill.engine.parallel.pipeline.link import Launch
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import Secret
from tokenmill.model.attention.context import ContextRanks
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.host_model import on_host
from tokenmill.model.sharding.shard import Shard
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import plan_model
from tokenmill.startup.assembly.follower import Follower, StageLeader

TIMEOUT = 30.0
Memories: TypeAlias = list[SharedMemory]
Part: TypeAlias = tuple[PartialModel, AttentionBackend, SharedMemory, str]


@dataclass(frozen=True, slots=True)
class Form:
    """The kernels and the memory that a model runs on.

    Attributes:
        make: makes the kernels of a rank.
    """

    make: Callable[[], Kernels]
    attention: str = "native"
    kv_dtype: torch.dtype | None = None

    def attend(self, decoder, kernels: Kernels, num_pages: int, ranks: ContextRanks | None = None) -> AttentionBackend:
        """The attention of a decoder."""
        native = getattr(kernels, "native", None)
        spec, dtype = decoder.attention_spec, getattr(torch, kernels.dtype)  # until the cut
        wanted = {"kv_dtype": self.kv_dtype, "native": native, "ranks": ranks}
        return make_attention(self.attention, spec, num_pages, 16, dtype, **wanted)


@contextlib.contextmanager
def memories(folder: Path, size: int, step: StepShape, stage: int = 0, num_stages: int = 1) -> Iterator[Memories]:
    """Return the view of each of `size` ranks of a stage on the memory that they share."""
    layout = Layout(read_architecture(folder), step, size, num_stages)
    descriptor = os.memfd_create("test-ranks")
    os.ftruncate(descriptor, layout.num_bytes)
    try:
        shared = [SharedMemory(descriptor, layout, Shard(rank, size, stage, num_stages)) for rank in range(size)]
        for memory in shared:
            memory.join([], TIMEOUT, False)
        yield shared
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def ranks(
    folder: Path, size: int, form: Form, num_pages: int, step: StepShape, num_stages: int = 1
) -> Iterator[tuple[RankedModel, AttentionBackend]]:
    """Rank 0's model and attention; the others follow until the end."""
    with contextlib.ExitStack() as stack:
        chain = stack.enter_context(chained(num_stages))
        followers: list[Follower] = []
        own: list[Any] = []
        for stage, end in enumerate(chain):
            shared = stack.enter_context(memories(folder, size, step, stage, num_stages))
            for memory in shared:
                part = _part(folder, form, num_pages, memory)
                if memory.shard.rank == 0 and isinstance(end, LaterStage):
                    followers.append(StageLeader(end, *part, iter(())))
                elif memory.shard.rank == 0:
                    own = [*part[:3], end]
                else:
                    followers.append(Follower(*part, iter(())))
        model, attention, memory, first = own
        threads = [threading.Thread(target=follower.run, daemon=True) for follower in followers]
        for thread in threads:
            thread.start()
        try:
            yield RankedModel(model, memory, first), attention
        finally:
            if not memory.is_broken:
                memory.post(End())
            if first is not None:
                first.send_end()
            for thread in threads:
                thread.join(TIMEOUT)
            assert not any(thread.is_alive() for thread in threads), "a rank has not ended"


@contextlib.contextmanager
def context_ranks(
    folder: Path, size: int, form: Form, num_pages: int, step: StepShape
) -> Iterator[tuple[ContextModel, AttentionBackend]]:
    """Rank 0's model and attention, of ranks that share a context; the others follow until the end."""

    def part(memory: SharedMemory) -> Part:
        kernels = form.make()
        decoder = plan_model(folder, read_architecture(folder), kernels).load()
        context = SharedContext(memory, step.tokens, TIMEOUT)
        attention = form.attend(decoder, kernels, num_pages, context)
        return on_host(decoder, attention), attention, memory, kernels.dtype

    with memories(folder, size, step) as shared:
        with ThreadPoolExecutor(size) as pool:  # they take memory together
            (model, attention, memory, _), *others = pool.map(part, shared)
        threads = [threading.Thread(target=Follower(*other, iter(())).run, daemon=True) for other in others]
        for thread in threads:
            thread.start()
        try:
            yield ContextModel(model, memory), attention
        finally:
            if not memory.is_broken:
                memory.post(End())
            for thread in threads:
                thread.join(TIMEOUT)
            assert not any(thread.is_alive() for thread in threads), "a rank has not ended"


def _part(folder: Path, form: Form, num_pages: int, memory: SharedMemory) -> Part:
    kernels = form.make()
    decoder = plan_model(folder, read_architecture(folder), kernels, collective=memory).load()
    attention = form.attend(decoder, kernels, num_pages)
    return on_host(decoder, attention), attention, memory, kernels.dtype


@contextlib.contextmanager
def chained(num_stages: int, secret: Secret | None = None) -> Iterator[list[FirstStage | LaterStage | None]]:
    """The ends of a chain, connected over unix sockets; of one stage, None."""
    if num_stages == 1:
        yield [None]
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = Address(f"unix:{folder}/first")
        first = FirstStage(StageListener(meeting, secret, TIMEOUT), num_stages, 1, Launch("", TIMEOUT))
        later = []
        for stage in range(1, num_stages):
            link = connect(meeting, secret, "stage 0", TIMEOUT, TIMEOUT)
            own = StageListener(Address(f"unix:{folder}/{stage}"), secret, TIMEOUT) if stage > 1 else None
            later.append(LaterStage(Shard(0, 1, stage, num_stages), link, own, secret, TIMEOUT))
        threads = [threading.Thread(target=end.join, args=("a model", TIMEOUT)) for end in later]
        for thread in threads:
            thread.start()
        first.gather("a model", TIMEOUT)
        for thread in threads:
            thread.join(TIMEOUT)
        try:
            yield [first, *later]
        finally:
            for end in (first, *later):
                end.close()
