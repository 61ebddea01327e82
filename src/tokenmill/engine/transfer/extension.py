"""`KVTransfer`: the desk's part in the loop of an engine. Sources answer between two steps, as events with ids."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tokenmill.core.extension import EngineExtension, Host
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.request import FinishReason
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.engine.transfer.desk import TransferDesk


class KVTransfer(EngineExtension):
    """Passes what happens in an engine to a desk, and the desk's news to the engine."""

    def __init__(self, scheduler: Scheduler, desk: TransferDesk) -> None:
        self._scheduler = scheduler
        self._desk = desk

    @property
    def has_waiting(self) -> bool:
        """True while a lookup, a load, a save or kept pages are open."""
        return self._desk.has_waiting

    def arrived(self, message: AddRequest) -> None:
        """Tell the sources of a request; they may refuse its `kv_transfer_params`."""
        self._desk.arrived(message)

    def poll(self, engine: Host) -> list[TokenOutput]:
        """Pass on what sources have done; end the requests whose KV failed to come."""
        engine.take_news(self._desk.collect())
        outputs = []
        for request_id, why in self._desk.take_failed():
            if engine.abort([request_id]):
                outputs.append(TokenOutput(request_id, [], FinishReason.ERROR, error=why))
        return outputs

    def before_schedule(self, engine: Host) -> None:
        """Look up the prompts whose turn may come."""
        engine.take_news(self._desk.ask(self._scheduler.take_queries()))

    def committed(self, outputs: Sequence[TokenOutput]) -> None:
        """Forget requests that have ended; replies of those whose pages are kept say so."""
        self._desk.ended(outputs)

    def released(self, ended: Sequence[str], alive: Container[str]) -> None:
        """Let the sources forget requests that have ended."""
        if ended:
            self._desk.forget(ended)

    def wait(self, timeout: float) -> None:
        """Wait until a load or a save is over."""
        self._desk.wait(timeout)

    def before_abort(self, engine: Host, ids: Sequence[str]) -> None:
        """End their loads: no source may write to pages that are about to be another request's."""
        engine.take_news(self._desk.cancel_loads(ids))

    def before_reset(self, engine: Host, preempt_running: bool) -> None:
        """End the saves of cached prefixes, with loads and kept pages if running requests are preempted too."""
        engine.take_news(self._desk.reset(everything=preempt_running))

    def forget_stored(self) -> None:
        """Let every source forget what it has stored."""
        self._desk.forget_stored()

    def close(self) -> None:
        """End all loads, and store what is unsaved while there is time."""
        self._desk.close()
