"""A machine that runs ranks of another's engine: `tokenmill serve MODEL --nnodes N --node-rank 1 --master-addr HOST`.

It waits for the first machine, starts its ranks when that machine begins, ends them when its engine ends, and waits
again. So an engine that is started again finds its ranks again, wherever they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import sys
import threading

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import EngineFailed, TokenMillError
from tokenmill.engine.parallel.pipeline.chain import connect
from tokenmill.engine.parallel.pipeline.link import Join, Launch, Link
from tokenmill.ipc.address import Address
from tokenmill.ipc.log_lines import logged
from tokenmill.ipc.secret import Secret
from tokenmill.startup.ranks.children import RankChildren

logger = logging.getLogger(__name__)

# How long the first machine is tried before this one looks whether it should end; and how often it looks.
_TRY_SECONDS = 1.0
_LOOK_SECONDS = 0.2
# In which the first machine answers, once it is connected: it may be taking in others.
_ANSWER_SECONDS = 30.0


def main() -> int:
    """Entry point: the arguments are the config as JSON, and how many engines there are."""
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    with logged("%(message)s", logging.INFO):
        try:
            return serve_node(config, int(sys.argv[2]))
        except TokenMillError as error:
            logger.error("error: %s", error)
            return error.exit_code


def serve_node(config: EngineConfig, num_engines: int) -> int:
    """Run this machine's ranks of all engines until Ctrl-C or SIGTERM; returns the exit code. In the main thread.

    Args:
        config: resolved; the same as on the first machine but for `node_rank`.

    Raises:
        InvalidConfig: the secret cannot be read.
    """
    secret, stop = Secret.read(config.master_secret), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    agents = [_Agent(config, index, num_engines, secret, stop) for index in range(num_engines)]
    threads = [threading.Thread(target=agent.run, name=f"engine {agent.index}") for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


class _Agent:
    """The ranks of one engine on this machine."""

    def __init__(
        self, config: EngineConfig, index: int, num_engines: int, secret: Secret, stop: threading.Event
    ) -> None:
        self.index = index
        self._config = dataclasses.replace(config, replica=(index, num_engines), seed=config.seed + index)
        self._address = Address(config.master_addr, config.master_port + index)
        self._secret = secret
        self._stop = stop

    def run(self) -> None:
        """Wait for the first machine and run the ranks, again and again until told to stop."""
        self._say(f"waits for the first one at {self._address}")
        while not self._stop.is_set():
            with contextlib.suppress(EngineFailed):
                link = connect(self._address, self._secret, "the first machine", _ANSWER_SECONDS, _TRY_SECONDS)
                try:
                    self._take_part(link)
                finally:
                    link.close()
                self._say("the engine has ended; waits for the next one")
            self._stop.wait(_LOOK_SECONDS)

    def _take_part(self, link: Link) -> None:
        """Run the ranks of one life of the engine."""
        link.send(Join(self._config.node_rank))
        said = link.receive(_ANSWER_SECONDS)
        if said is None or not isinstance(launch := said[0], Launch):
            raise EngineFailed("the first machine refuses this one")
        count = self._config.num_ranks_here
        ranks = range(self._config.node_rank * count, (self._config.node_rank + 1) * count)
        self._say(f"starts rank {ranks.start}" + (f" to {ranks.stop - 1}" if count > 1 else ""))
        children = RankChildren(
            dataclasses.replace(self._config, model=launch.model, rank_timeout=launch.timeout), ranks
        )
        try:
            while not self._stop.is_set() and link.receive(_LOOK_SECONDS) is None:
                children.check()
        except EngineFailed as error:
            link.close(str(error))
        finally:
            children.close()

    def _say(self, text: str) -> None:
        logger.info("machine %d of %d: %s", self._config.node_rank, self._config.nnodes, text)


if __name__ == "__main__":
    sys.exit(main())
