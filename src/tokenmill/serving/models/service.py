"""`ModelService`: carries out what the keeper decides, and lets requests wait for their model.

All of it happens in one event loop. A request claims a model, waits for its turn, and gives the claim back at its end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tokenmill.core.errors import TokenMillError
from tokenmill.serving.models.catalogue import Catalogue, Entry
from tokenmill.serving.models.errors import ModelFailed, ModelNotLoaded
from tokenmill.serving.models.keeper import Admit, Keeper, Order, Refuse, Sleep, Start, Stop, Wake
from tokenmill.serving.models.model_server import ModelServer
from tokenmill.serving.models.records import ModelRecord, Ticket
from tokenmill.serving.models.reports import Loaded, Loading, Report
from tokenmill.serving.models.states import RESIDENT, ModelState
from tokenmill.serving.server.http.errors import ServerStopping, without_folders

_logger = logging.getLogger(__name__)
# Exit code of a mistake of the user, such as a checkpoint that cannot be read: the next start would end alike.
_MISTAKE = 2
# Those who have waited for the model go first.
_SPARE_SECONDS = 0.2


class Claim:
    """A request's claim on a model, from its question to its end."""

    def __init__(self, service: ModelService, ticket: Ticket, wait_seconds: float) -> None:
        self._service = service
        self._wait_seconds = wait_seconds
        self.ticket = ticket
        self.turn: asyncio.Future[ModelServer] = asyncio.get_running_loop().create_future()
        # An error that nobody waits for any more is no news.
        self.turn.add_done_callback(lambda turn: turn.cancelled() or turn.exception())

    @property
    def reason(self) -> str:
        """Reason for its wait, in one sentence."""
        return self._service.reason(self.ticket)

    async def admitted(self) -> ModelServer:
        """Wait for the model's turn, and return its server.

        Raises:
            ModelNotLoaded: it has waited for too long, or an operator has unloaded the model.
            ModelFailed: the model cannot be loaded.
        """
        try:
            return await asyncio.wait_for(asyncio.shield(self.turn), self._wait_seconds)
        except TimeoutError:
            raise ModelNotLoaded(
                f"the request has waited for {self._wait_seconds:g} s (--models-wait): {self.reason}"
            ) from None

    def leave(self, keep_alive: float | None = None) -> None:
        """Give the claim back; `keep_alive`: see `Keeper.leave`. A second time does nothing."""
        self._service.leave(self, keep_alive)


class ModelService:
    """The models of a server.

    Attributes:
        catalogue: all models. keeper: their states.
        loads: how often each was loaded. wakes: how often it was woken up. deaths: how often its server died.
        last_used: name of the model that a request asked for last.
    """

    def __init__(
        self,
        read: Callable[[], Catalogue],
        folder: Path,
        limits: tuple[int, float, float],
        available: Callable[[], int],
        log: Callable[[str, str], None],
    ) -> None:
        """Find the models.

        Args:
            read: returns the models that there are.
            folder: private, for the sockets.
            limits: bytes for all models, seconds that an unused one stays, seconds that a request waits.
            available: returns the bytes that the machine has left.
            log: called with an event's name and a line.
        """
        budget, self._ttl, self._wait_seconds = limits
        self._read = read
        self.catalogue = read()
        self.keeper = Keeper(budget, {entry.name: entry.rules(self._ttl) for entry in self.catalogue})
        self.servers: dict[str, ModelServer] = {}
        self.progress: dict[str, Loading] = {}
        self.loaded: dict[str, Loaded] = {}
        self.loads: Counter[str] = Counter()
        self.wakes: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.last_used: str | None = None
        self._folder = folder
        self._available = available
        self._log = log
        self._claims: dict[Ticket, Claim] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0
        self._spare: ModelServer | None = None
        self._ending: TokenMillError | None = None

    def record(self, name: str) -> ModelRecord:
        """Return what the keeper knows of a model."""
        return self.keeper.models[name]

    def reason(self, ticket: Ticket) -> str:
        """Return why a claim waits, with the progress of its model's load."""
        text = self.keeper.reason(ticket)
        loading = self.progress.get(ticket.model)
        if loading is None or self.record(ticket.model).state is not ModelState.LOADING:
            return text
        share = f" {loading.done / loading.total:.0%}" if loading.total else ""
        return f"{text}: {loading.phase}{share}"

    # --- what clients ask for ---------------------------------------------------------------------------------------

    def claim(self, entry: Entry, is_asked: bool = True) -> Claim:
        """Claim a model for a request; it must be given back. `is_asked`: a client has named it just now.

        Raises:
            ModelTooLarge, ModelFailed, QueueFull: see `Keeper.ask`.
        """
        if self._ending is not None:
            raise self._ending
        if entry.description.problem:
            raise ModelFailed(f"model {entry.name} cannot be served: {entry.description.problem}")
        claim = Claim(self, self.keeper.ask(entry.name, time.monotonic()), self._wait_seconds)
        self._claims[claim.ticket] = claim
        if is_asked:
            self.last_used = entry.name
        self._act()
        return claim

    def leave(self, claim: Claim, keep_alive: float | None) -> None:
        """Give back a claim, for the claim itself; a second time does nothing."""
        if self._claims.pop(claim.ticket, None) is not None:
            self.keeper.leave(claim.ticket, time.monotonic(), keep_alive)
            claim.turn.cancel()
            self._act()

    def load(self, entry: Entry) -> None:
        """Let a model be loaded when it is its turn.

        Raises:
            ModelTooLarge, ModelFailed, QueueFull: it will not be.
        """
        self._keep(self._loaded(self.claim(entry)))

    async def _loaded(self, claim: Claim) -> None:
        try:
            await claim.admitted()
        except TokenMillError as error:
            self._log("failed", str(error))
        finally:
            claim.leave()

    def unload(self, entry: Entry) -> None:
        """Let a model leave when what it has begun has ended."""
        self._act(self.keeper.unload(entry.name))

    async def reload(self) -> None:
        """Look again for models: new ones are there at once, those that are gone once they have left.

        Raises:
            InvalidConfig: models and presets do not go together any more.
        """
        catalogue = await asyncio.to_thread(self._read)
        for entry in self.catalogue:
            if entry.name not in catalogue:
                self.unload(entry)
        stays = [entry for entry in self.catalogue if entry.name not in catalogue and entry.name in self.resident]
        self.catalogue = Catalogue([*catalogue, *stays])
        self.keeper.replace({entry.name: entry.rules(self._ttl) for entry in self.catalogue})
        self._act()

    # --- start and end ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the pinned models, and be prepared for others."""
        self._renew_spare()
        for entry in self.catalogue:
            if entry.preset.pinned:
                try:
                    self.load(entry)
                except TokenMillError as error:
                    self._log("failed", str(error))

    def end_waits(self) -> None:
        """Refuse those who wait for a model, and all who come later."""
        self._ending = ServerStopping("the server is stopping")
        for claim in self._claims.values():
            if not claim.turn.done():
                claim.turn.set_exception(self._ending)

    async def close(self) -> None:
        """End all servers, whatever they do; wait until their last process has exited."""
        self.end_waits()
        if self._timer is not None:
            self._timer.cancel()
        for server in self.servers.values():
            server.stop()
        if self._spare is not None:
            self._spare.stop()
            await self._spare.gone()
        while self.servers:
            await asyncio.sleep(0.01)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what the keeper decides ------------------------------------------------------------------------------------

    def _act(self, orders: list[Order] | None = None) -> None:
        """Carry out these orders, and all that follow from the state of things now."""
        if self._ending is not None:
            return
        now = time.monotonic()
        for order in [*(orders or ()), *self.keeper.decide(now, self._available())]:
            match order:
                case Start(name):
                    self._start(name)
                case Stop(name):
                    self.servers[name].stop()
                case Sleep(name):
                    self._keep(self._put_to_sleep(name, self.servers[name]))
                case Wake(name):
                    self.wakes[name] += 1
                case Admit(ticket):
                    turn = self._claims[ticket].turn
                    if not turn.done():
                        turn.set_result(self.servers[ticket.model])
                case Refuse(ticket, error):
                    turn = self._claims[ticket].turn
                    if not turn.done():
                        turn.set_exception(error)
        if self._timer is not None:
            self._timer.cancel()
        until = self.keeper.next_time(now)
        if until < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(0.0, until - now), self._act)

    def _start(self, name: str) -> None:
        self.loads[name] += 1
        self._log("loading", f"model {name} is loaded")
        server, self._spare = self._spare, None
        if server is not None and not server.is_alive:
            self._keep(self._bury(server))
            server = None
        server = server or self._new_server()
        launch = self.catalogue[name].launch_of(server.folder, len(self.catalogue))
        server.serve(name, launch, lambda report: self._reported(name, report))
        self.servers[name] = server
        self._keep(self._watch(name, server))

    async def _put_to_sleep(self, name: str, server: ModelServer) -> None:
        """Have a model give memory back; one that does not is unloaded instead, if the room is still needed."""
        is_asleep = await server.sleep(self.catalogue[name].keys)
        if self.servers.get(name) is server:
            self.keeper.slept(name, server.bytes_of().own if is_asleep else None)
            self._act()

    def _new_server(self) -> ModelServer:
        self._number += 1
        return ModelServer(self._folder / f"m{self._number}", lambda line: self._log("output", line))

    async def _bury(self, server: ModelServer) -> None:
        how, _ = await server.gone()
        self._log("death", f"a server that no model had yet: {how}")

    def _renew_spare(self) -> None:
        """Start a server ahead of time: when its turn comes, its code is loaded."""
        if self._spare is None and self._ending is None:
            self._spare = self._new_server()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _reported(self, name: str, report: Report) -> None:
        if isinstance(report, Loading):
            self.progress[name] = report
        elif isinstance(report, Loaded):
            self.loaded[name] = report
            self.progress.pop(name, None)
            self.keeper.ready(name, time.monotonic(), self._asleep_bytes(name))
            self._act()
            if len(self.catalogue) > 1:
                asyncio.get_running_loop().call_later(_SPARE_SECONDS, self._renew_spare)

    def _asleep_bytes(self, name: str) -> int | None:
        """Return the bytes that a model just loaded will take while it sleeps: all but KV and weights that are mapped.

        None: sleep would free nothing.
        """
        memory = self.catalogue[name].description.memory
        weights = memory.weights + memory.tower
        asleep = memory.processes + memory.states + max(0, weights - self.servers[name].bytes_of().mapped)
        return asleep if asleep < memory.total else None

    async def _watch(self, name: str, server: ModelServer) -> None:
        how, code = await server.gone()
        del self.servers[name]
        self.progress.pop(name, None)
        self.loaded.pop(name, None)
        was_told = self.record(name).state is ModelState.UNLOADING
        if not was_told and self._ending is None:
            self.deaths[name] += 1
            self._log("death", f"model {name}: {how}")
        is_final = code == _MISTAKE
        # What clients may know of it: not the last lines of its log.
        problem = without_folders(how.partition("\n")[0])
        self._act(self.keeper.exited(name, time.monotonic(), problem, code, is_final))
        server.is_gone.set()

    @property
    def resident(self) -> list[str]:
        """Names of the models whose processes exist."""
        return [name for name, record in self.keeper.models.items() if record.state in RESIDENT]


def exit_text(code: int) -> str:
    """Return how a process ended, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
