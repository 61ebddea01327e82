"""Connect the devices of ranks: by NCCL, and where it is asked for by sums of our own."""

from __future__ import annotations

from pathlib import Path

from tokenmill.config.configs import EngineConfig
from tokenmill.engine.parallel.devices.collective import DeviceCollective
from tokenmill.engine.parallel.devices.stage_model import connect
from tokenmill.model.sharding.shard import Shard
from tokenmill.platform.communicator import Communicator
from tokenmill.platform.protocol import Platform


def connect_devices(
    config: EngineConfig, shard: Shard, platform: Platform, rendezvous: Path, seconds: float
) -> DeviceCollective:
    """Connect a rank's device to those of the others.

    Args:
        rendezvous: path that all ranks know; they meet at files whose names begin with it.
        seconds: how long a rank waits for the others.

    Raises:
        InvalidConfig: the devices cannot add up as the config says.
    """

    def meet(name: str, rank: int, size: int) -> Communicator:
        return platform.communicator(Path(f"{rendezvous}.{name}"), rank, size, seconds)

    def meet_beside(name: str, rank: int, size: int) -> Communicator:
        communicator = meet(name, rank, size)
        if config.all_reduce == "nccl" or config.tensor_parallel_size == 1:
            return communicator
        from tokenmill.engine.parallel.devices.one_shot import OneShotCommunicator

        meeting = Path(f"{rendezvous}.{name}-memory")
        return OneShotCommunicator(communicator, platform, meeting, rank, size, seconds, config.batch_invariant)

    return connect(shard, meet, meet_beside, config.num_steps_ahead)
