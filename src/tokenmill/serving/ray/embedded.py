"""Run a server inside another program's process, which serves its app and decides when it ends."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import EngineDead, InvalidConfig
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.serving.replicas.starter import ENGINE_MODULE, Starter
from tokenmill.serving.server.http.application import Application
from tokenmill.serving.server.http.descriptors import raise_limit
from tokenmill.serving.server.http.errors import ServerStopping
from tokenmill.serving.server.process.api_process import cancel
from tokenmill.serving.server.process.first_process import FirstProcess
from tokenmill.serving.server.process.screen import StandardError
from tokenmill.serving.server.process.start_checks import check_sockets, check_start


class EmbeddedServer(FirstProcess):
    """The parts of one server in the current event loop, without a listener and without signals."""

    def __init__(self, launch: LaunchFile, engine_module: str = ENGINE_MODULE) -> None:
        """Make a private folder for the server; nothing is started yet.

        Raises:
            InvalidConfig, InvalidCheckpoint: see `check_start`.
        """
        if launch.topology.api_workers:
            raise InvalidConfig("--api-server-count must be 1 here: the app is served in this one process")
        raise_limit()
        check_start(launch.server, launch.topology)
        self._private = Path(tempfile.mkdtemp(prefix="tokenmill-"))
        try:
            check_sockets(self._private, launch.topology)
            launch.write(self._private)
            super().__init__(self._private, launch, None, StandardError(), lambda: None, Starter(engine_module))
        except BaseException:
            shutil.rmtree(self._private)
            raise
        self._tasks: list[asyncio.Task[None]] = []
        self._app: asyncio.Future[Application] = asyncio.get_running_loop().create_future()

    async def begin(self) -> Application:
        """Start the parts; return the app once they are ready.

        Raises:
            EngineDead: a part cannot start; all others have been ended.
        """
        self._tasks = self._begin()
        try:
            outcomes: list[asyncio.Future[Any]] = [self._app, self._ending]
            await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
            if self._ending.done():
                raise EngineDead(self._ending.result().error or "the server was ended while it started")
        except BaseException:
            await self.end()
            raise
        return self._app.result()

    async def end(self) -> None:
        """End open calls with an error, then all parts; the program waits for open replies before."""
        self._client.fail(ServerStopping("the server is stopping"))
        await cancel(self._tasks)
        await self._let_go()
        shutil.rmtree(self._private, ignore_errors=True)

    async def _listen(self, ready: EngineReady) -> None:
        self._app.set_result(self._build_app(ready, on_loopback=False))

    @property
    def failure(self) -> str | None:
        """The reason why this server should be replaced; a part that is being started again is no reason."""
        if self._ending.done():
            return self._ending.result().error
        return None if self._parts.is_recovering else self._trouble()

    @property
    def load(self) -> dict[str, Any]:
        """The load of this server, for choosing among several."""
        stats = self._parts.engines.stats
        return {
            "requests_open": self._client.num_open,
            "requests_running": stats.num_running,
            "requests_waiting": stats.num_waiting,
            "pages": stats.num_pages,
            "pages_pinned": stats.num_pages_pinned,
            "kv_usage": stats.num_pages_pinned / max(1, stats.num_pages),
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
        }
