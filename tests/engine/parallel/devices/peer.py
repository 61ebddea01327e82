"""A rank on a device that does not exist: `peer.py CONFIG CALLS`, with the config of the engine and of this rank.

What it has told the others is written to CALLS at its end. Ranks that share a context split it at every page of the
config: at 256 keys interpreted steps would be long.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tests.engine.parallel.devices.counting import RankPlatform
from tests.model.kernels.interpreter import replace_language_once
from tokenmill.config.configs import EngineConfig
from tokenmill.model.kernels.triton import attention, splits
from tokenmill.startup.assembly.device_follower import build_device_follower
from tokenmill.startup.ranks.group import Group, config_of_rank


def main() -> None:
    """Follow to the end."""
    replace_language_once()
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineConfig)
    if config.context_parallel_size > 1:
        splits.SPLIT_KEYS = attention.SPLIT_KEYS = config.page_size
    platform, group = RankPlatform(), Group(config)
    try:
        follower = build_device_follower(config_of_rank(config), group, platform)
        print("follows", flush=True)
        follower.run()
        follower.close()
    except BaseException as error:
        group.abandon(error)
        raise
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(platform.calls))


if __name__ == "__main__":
    main()
