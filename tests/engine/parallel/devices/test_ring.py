"""Stages that hand hidden states round a ring have the numbers of one process, in every family, bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.engine.parallel.devices.test_collective import TIMEOUT, together
from tests.engine.parallel.test_forward import FAMILIES, checkpoint
from tests.paging import PagedRequests, make_attention, random_schedule
from tokenmill.engine.parallel.devices.ring import StageRing
from tokenmill.engine.parallel.devices.stage_model import StageModel, connect
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.sharding.shard import Shard
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import load_model, plan_model
from tokenmill.platform.communicator import Communicator, over_gloo


@pytest.mark.parametrize(
    ("family", "size"), [*((family, 1) for family in FAMILIES), ("qwen3", 2), ("qwen3_moe", 2), ("gpt_oss", 2)]
)
def test_stages_have_the_numbers_of_one(family: str, size: int, rng: np.random.Generator, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", family, torch.float32)
    architecture = read_architecture(folder)
    num_stages = 2 if size > 1 else min(3, len(architecture.layers))
    lengths = rng.integers(1, 60, 4).tolist()
    schedule = list(random_schedule(lengths, 40, rng))
    requests = PagedRequests([rng.integers(0, 331, length).tolist() for length in lengths], 16, rng)
    batches = [requests.batch(chunks) for chunks in schedule]
    # Chunks in the middle of a prompt have no outputs: then nothing comes back.
    batches[0] = msgspec.structs.replace(batches[0], output_indices=batches[0].output_indices[:0])
    every = load_model(folder, architecture, TorchKernels("float32", "cpu"))
    alone = make_attention("reference", every.attention_spec, requests.num_pages, 16, torch.float32)
    wanted = [every.logits(every.forward(batch, alone)) for batch in batches]

    def run(rank: int) -> None:
        def meet(name: str, own: int, size: int) -> Communicator:
            return over_gloo(tmp_path / name, own, size, TIMEOUT)

        shard = msgspec.structs.replace(Shard.from_rank(rank, size, num_stages), sums=True)
        collective = connect(shard, meet, meet, 2)
        decoder = plan_model(folder, architecture, TorchKernels("float32", "cpu"), collective=collective).load()
        model = StageModel(decoder, collective, "cpu")
        attention = make_attention("reference", decoder.attention_spec, requests.num_pages, 16, torch.float32)
        pending: deque[Callable[[], None]] = deque()
        for number, batch in enumerate(batches):
            if rank >= size:
                model.hand_on(model.layers(batch, attention, model.receive(model.empty(len(batch.token_ids)))))
                continue
            _, outputs = model.begin_pass(model.layers(batch, attention), len(batch.output_indices))
            pending.append(lambda number=number, outputs=outputs: compare(model.logits(outputs()), number))
            if len(pending) == 2:
                pending.popleft()()
        for check in pending:
            check()

    def compare(logits: torch.Tensor, number: int) -> None:
        # Ranks of a stage sum in another order.
        is_same = torch.equal if size == 1 else partial(torch.allclose, atol=1e-4, rtol=1e-4)
        assert is_same(logits, wanted[number]), f"step {number}"

    failures = together(run, num_stages * size)
    assert not failures, failures[0]


class Pipe:
    """Both ends of a way, in one process."""

    def __init__(self) -> None:
        self.offered: deque[torch.Tensor] = deque()
        self.num_ended = 0
        self.is_aborted = False

    def offer(self, numbers: torch.Tensor) -> Callable[[], object]:
        self.offered.append(numbers.clone())
        return self.end

    def end(self) -> None:
        self.num_ended += 1

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.copy_(self.offered.popleft())

    def abort(self) -> None:
        self.is_aborted = True


def test_a_ring_keeps_what_is_on_its_way_and_waits_for_the_oldest() -> None:
    source, target = Pipe(), Pipe()
    ring = StageRing(source, target, 2)  # type: ignore[arg-type]
    for number in range(5):
        ring.send(torch.full((2, 3), float(number)))
        ring.send(torch.empty(0, 3))
        assert target.num_ended == max(0, number - 1)
    assert [int(sent[0, 0]) for sent in target.offered] == [0, 1, 2, 3, 4], "what has no rows is not sent"
    ring.abort()
    assert source.is_aborted and target.is_aborted
