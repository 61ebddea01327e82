"""Run the process of a rank other than 0. It ends when rank 0 says so, when a rank is gone, or with its parent.

Offline: `python -m tokenmill.startup.assembly.rank_process CONFIG`; ranks of a server start as its engines do.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import EngineFailed, TokenMillError
from tokenmill.core.messages import ToEngine
from tokenmill.core.part_messages import PartFailed, Ping, Pong
from tokenmill.ipc.channels import API, LINGER_MILLISECONDS, Inbox, Outbox, engine_name
from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.ipc.interrupts import end_with_parent
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.log_lines import FORMAT_WITH_TIME, logged

if TYPE_CHECKING:
    from tokenmill.platform.protocol import Platform
    from tokenmill.startup.assembly.device_follower import DeviceFollower
    from tokenmill.startup.assembly.follower import Follower

logger = logging.getLogger(__name__)

# How often a busy rank looks for questions.
LOOK_SECONDS = 0.1
# As an engine: how many times the time of a step a phase of the start may take.
START_PATIENCE = 20.0
EXIT_FAILED = 1


def serve_rank(folder: Path, index: int, rank: int, life: int) -> int:
    """Be a rank of a server's engine until it ends; returns the exit code."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToEngine] = Inbox(context, folder, engine_name(index, rank, life), ToEngine)
    api = Outbox(context, folder, API)
    # Rank 0 says when it ends: until then it may be in the middle of a step.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        launch = LaunchFile.read(folder)
        config = launch.engine_config(index, life, rank, folder)
        with Heartbeat(context, folder, inbox, launch.server.engine_timeout) as heartbeat:
            _follow(config, _Signs(heartbeat, inbox, api))
    except TokenMillError as error:
        api.send(PartFailed(inbox.name, str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        logger.exception("the rank ends")
        api.send(PartFailed(inbox.name, f"rank {rank} failed: {type(error).__name__}: {error}", EXIT_FAILED))
        return EXIT_FAILED
    finally:
        context.destroy(linger=LINGER_MILLISECONDS)
    return 0


class _Signs:
    """Tells the server that a rank is alive and what it is busy with."""

    def __init__(self, heartbeat: Heartbeat, inbox: Inbox[ToEngine], api: Outbox) -> None:
        self._heartbeat = heartbeat
        self._inbox = inbox
        self._api = api
        self._next_look = 0.0

    def starting(self, phase: str, done: int, total: int) -> None:
        """Report the current phase of the start."""
        self._heartbeat.begin_job(phase, START_PATIENCE)

    def report_iteration(self, has_work: bool) -> None:
        """Report a piece of work that is about to begin, or an idle iteration."""
        if has_work:
            self._heartbeat.begin_job("a step")
        else:
            self._heartbeat.rest()
        if (now := time.monotonic()) >= self._next_look or not has_work:
            self._next_look = now + LOOK_SECONDS
            while (message := self._inbox.receive()) is not None:
                if isinstance(message, Ping):
                    self._api.send(Pong(self._inbox.name))


def _follow(config: EngineConfig, signs: _Signs | None = None) -> None:
    # Here and not above: they take long to load.
    from tokenmill.platform.select import select_platform
    from tokenmill.startup.ranks.group import Group, config_of_rank

    platform = select_platform(device_of_rank(config))
    config = dataclasses.replace(config, device=platform.device).resolve()
    group, own = Group(config), config_of_rank(config)
    build = _builder(platform)
    try:
        if signs is None:
            build(own, group, platform).run()
        else:
            build(own, group, platform, signs.starting).run(signs.report_iteration)
    except BaseException as error:
        group.abandon(error)
        raise


def device_of_rank(config: EngineConfig) -> str:
    """Return the device of a rank: a GPU of its own, counted from the config's device, or from the first."""
    kind, _, first = config.device.partition(":")
    return f"{kind}:{int(first or 0) + config.rank}" if kind in ("auto", "cuda") else config.device


def _builder(platform: Platform) -> Callable[..., Follower | DeviceFollower]:
    """Return the function that makes a follower for this platform; that of GPUs needs torch."""
    if platform.is_accelerator:
        from tokenmill.startup.assembly.device_follower import build_device_follower

        return build_device_follower
    from tokenmill.startup.assembly.follower import build_follower

    return build_follower


def main() -> int:
    """Entry point of a rank of an offline engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineConfig)
    with logged(FORMAT_WITH_TIME):
        try:
            _follow(config)
        except EngineFailed:
            return EXIT_FAILED  # rank 0 says why
        except TokenMillError as error:
            logger.error("%s", error)
            return error.exit_code
        return 0


if __name__ == "__main__":
    sys.exit(main())
