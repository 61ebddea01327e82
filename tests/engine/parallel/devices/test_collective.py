"""Ranks that sum have, within rounding, what one alone has: every family, its matrices cut by rows or by columns."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.parallel.devices.counting import Call, CountingCommunicator
from tests.engine.parallel.test_forward import FAMILIES, checkpoint
from tests.paging import PagedRequests, make_attention, random_schedule
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.parallel.devices.collective import DeviceCollective, DeviceModel
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.sharding.shard import Shard, check_size
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import load_model, plan_model
from tokenmill.platform.communicator import over_gloo

TIMEOUT = 60.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_sum_have_the_numbers_of_one(
    family: str, size: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", family, torch.float32)
    architecture, calls = read_architecture(folder), {}
    lengths = rng.integers(1, 60, 4).tolist()
    schedule = list(random_schedule(lengths, 40, rng))
    requests = PagedRequests([rng.integers(0, 331, length).tolist() for length in lengths], 16, rng)
    batches = [requests.batch(chunks) for chunks in schedule]
    every = load_model(folder, architecture, TorchKernels("float32", "cpu"))
    alone = make_attention("reference", every.attention_spec, requests.num_pages, 16, torch.float32)
    wanted = [every.logits(every.forward(batch, alone)) for batch in batches]
    whole_bytes = sum(read.num_bytes for read in plan_model(folder, architecture, TorchKernels("float32", "cpu")).reads)

    def run(rank: int) -> None:
        communicator = CountingCommunicator(over_gloo(tmp_path / "meeting", rank, size, TIMEOUT))
        collective = DeviceCollective(Shard(rank, size, sums=True), communicator)
        plan = plan_model(folder, architecture, TorchKernels("float32", "cpu"), collective=collective)
        assert sum(read.num_bytes for read in plan.reads) < whole_bytes * (1 / size + 0.1)  # routers, norms, KV heads
        decoder = plan.load()
        model = DeviceModel(decoder, collective)
        attention = make_attention("reference", decoder.attention_spec, requests.num_pages, 16, torch.float32)
        for number, batch in enumerate(batches):
            logits = model.logits(model.forward(batch, attention))
            close = torch.allclose(logits, wanted[number], atol=1e-4, rtol=1e-4)
            assert close, f"step {number} differs by {(logits - wanted[number]).abs().max()}"
        calls[rank] = communicator.calls

    failures = together(run, size)
    assert not failures, failures[0]
    assert all(calls[rank] == calls[0] for rank in range(size)), "ranks make the same calls in the same order"
    # Attention and feed-forward block; where experts stand beside a dense block, and each has a norm, these two apart.
    mixtures = [layer.mlp for layer in architecture.layers if isinstance(layer.mlp, MoeSpec)]
    num_apart = sum(mixture.norm is not None for mixture in mixtures)
    assert count(calls[0], "sum") == len(batches) * (1 + 2 * len(architecture.layers) + num_apart)
    assert count(calls[0], "gather") == len(batches)


def together(run, size: int) -> list[BaseException]:
    """Ranks as threads; what they raise."""
    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            with torch.inference_mode():
                run(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    assert failures or not any(thread.is_alive() for thread in threads), "a rank has not ended"
    return failures


def count(calls: list[Call], name: str) -> int:
    return sum(called == name for called, _, _ in calls)


def test_sizes_that_sums_allow(tmp_path: Path) -> None:
    architecture = read_architecture(checkpoint(tmp_path, "qwen3_moe"))
    check_size(architecture, 8, sums=True)  # more ranks than experts: each has a part of all
    with pytest.raises(InvalidConfig, match=r"what works: 1, 2, 4, 8$"):
        check_size(architecture, 3, sums=True)
