"""A rank that adds up, in a process of its own: `rank_sums FOLDER RANK RANKS SEED`.

It makes the same sums as the others, of the same sizes and types, late now and then; it prints which differ from a sum
of all ranks' numbers in float32 and in the order of ranks, and how many sums it has made.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from tests.model.kernels.gpu import HALF
from tests.model.kernels.interpreter import replace_language_once
from tokenmill.engine.parallel.devices import one_shot
from tokenmill.model.kernels.triton.all_reduce import BLOCK_BYTES
from tokenmill.platform.communicator import NoPeers
from tokenmill.platform.cpu import CpuPlatform

SUMS = 24
BLOCK = BLOCK_BYTES // 2
TYPES = (HALF, torch.float32)
# As many bytes as one launch has, so that a sum in pieces has several launches.
MOST_READ = 40_000


def numbers(seed: int, turn: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a rank: some far larger than others, so that the order of a sum shows."""
    drawn = np.random.default_rng([seed, turn, rank])
    return torch.from_numpy(drawn.normal(size=count) * 10.0 ** drawn.integers(-3, 4, count)).to(dtype)


def main() -> None:
    """Make the sums."""
    folder, rank, size, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    replace_language_once()
    one_shot.MOST_READ = MOST_READ
    channel = one_shot.OneShotCommunicator(NoPeers(), CpuPlatform(), folder / "memory", rank, size, 60.0, is_whole=True)
    shared, own = random.Random(seed), random.Random(seed + rank)
    wrong = []
    for turn in range(SUMS):
        count = shared.choice([1, BLOCK - 1, BLOCK, shared.randint(1, 4 * BLOCK), 10 * BLOCK + 3])
        dtype = shared.choice(TYPES)
        every = [numbers(seed, turn, one, count, dtype) for one in range(size)]
        if own.random() < 0.3:
            time.sleep(own.random() / 20)
        found = channel.sum(every[rank].clone())
        total = torch.zeros(count)
        for one in every:
            total += one.float()
        if not torch.equal(found, total.to(dtype)):
            places = (found != total.to(dtype)).nonzero().view(-1)
            wrong.append((turn, count, str(dtype), len(places), int(places[0])))
    print(json.dumps({"wrong": wrong, "sums": SUMS}))


if __name__ == "__main__":
    main()
