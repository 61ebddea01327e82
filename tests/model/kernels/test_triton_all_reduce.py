"""Ranks that read each other's memory have the sum of all, bit for bit, however late one of them is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.house.source_tree import ROOT
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.parallel.devices import one_shot
from tokenmill.platform.communicator import NoPeers
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.peer_memory import PeerMemory

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")


SECONDS = 200


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_same_sum(size: int, tmp_path: Path) -> None:
    seed = seed_for(f"{__name__} {size}")
    print(f"seed {seed}")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.model.kernels.rank_sums", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        printed = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
    told = [json.loads(text) for text in printed]
    assert [one["wrong"] for one in told] == [[]] * size
    assert all(one["sums"] > 0 for one in told)


def test_a_sum_that_waits_for_a_rank_ends_when_the_ranks_are_given_up(tmp_path: Path) -> None:
    channel = one_shot.OneShotCommunicator(NoPeers(), CpuPlatform(), tmp_path / "memory", 0, 2, 60.0)
    own, ended = torch.ones(100), threading.Event()

    def wait() -> None:
        channel.sum(own)
        ended.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert not ended.is_set(), "the other rank has not come"
    channel.abort()
    assert ended.wait(60)
    assert own.tolist() == [1.0] * 100


def test_larger_sums_are_left_to_the_library(tmp_path: Path) -> None:
    asked: list[int] = []

    class Library(NoPeers):
        def sum(self, own: torch.Tensor) -> torch.Tensor:
            asked.append(own.nbytes)
            return own

    channel = one_shot.OneShotCommunicator(Library(), CpuPlatform(), tmp_path / "memory", 0, 1, 60.0)
    channel.sum(torch.ones(one_shot.MOST_READ + 4, dtype=torch.uint8).view(torch.float32))
    channel.sum(torch.ones(64))
    assert asked == [one_shot.MOST_READ + 4]
    assert [one_shot.most_bytes(size) for size in (2, 3, 8)] == [1 << 20, 1 << 19, 36 * 4096]


def test_devices_that_cannot_read_each_other_are_refused(tmp_path: Path) -> None:
    class Apart(CpuPlatform):
        def peer_memory(self, meeting: Path, rank: int, size: int, num_bytes: int, seconds: float) -> PeerMemory:
            raise RuntimeError("peer access is not supported")

    with pytest.raises(InvalidConfig, match=r"peer access is not supported.*use --all-reduce nccl"):
        one_shot.OneShotCommunicator(NoPeers(), Apart(), tmp_path / "memory", 0, 2, 60.0)
