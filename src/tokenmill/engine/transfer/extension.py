"""Run a KV connector in the loop of an engine: sources answer between two steps, and the orders of plans go to them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from tokenmill.core.extension import EngineExtension, Host
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.core.request import FinishReason
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.engine.transfer.connector import KVConnector
from tokenmill.engine.transfer.protocol import KVSource


class Launcher(Protocol):
    """The part of `Executor` that is needed here."""

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Start a step."""

    def recover(self) -> None:
        """Run plans again after a failure."""

    def close(self) -> None:
        """Let go of what steps ran with."""


class KVTransfer(EngineExtension):
    """Tells a connector of the requests of an engine, and gives its events to the engine."""

    def __init__(self, scheduler: EngineScheduler, connector: KVConnector) -> None:
        self._scheduler = scheduler
        self._connector = connector

    @property
    def sources(self) -> tuple[KVSource, ...]:
        """The sources, in the order in which they are asked."""
        return self._connector.sources

    @property
    def has_waiting(self) -> bool:
        """True while a lookup, a load, a save or kept pages are open."""
        return self._connector.has_waiting

    def arrived(self, message: AddRequest) -> None:
        """Tell the sources of a request; they may refuse its `kv_transfer_params`."""
        self._connector.arrived(message)

    def poll(self, engine: Host) -> list[TokenOutput]:
        """Pass on what sources have done; end the requests whose KV failed to come."""
        engine.apply_transfer_events(self._connector.collect())
        outputs = []
        for request_id, why in self._connector.take_failed():
            if engine.abort([request_id]):
                outputs.append(TokenOutput(request_id, [], FinishReason.ERROR, error=why))
        return outputs

    def before_schedule(self, engine: Host) -> None:
        """Look up the prompts whose turn may come."""
        engine.apply_transfer_events(self._connector.look_up(self._scheduler.take_queries()))

    def committed(self, outputs: Sequence[TokenOutput]) -> None:
        """Forget requests that have ended; replies of those whose pages are kept say so."""
        self._connector.ended(outputs)

    def released(self, ended: Sequence[str], alive: Container[str]) -> None:
        """Let the sources forget requests that have ended."""
        if ended:
            self._connector.forget_requests(ended)

    def wait(self, timeout: float) -> None:
        """Wait until a load or a save is over."""
        self._connector.wait(timeout)

    def before_abort(self, engine: Host, ids: Sequence[str]) -> None:
        """End their loads: no source may write to pages that are about to be another request's."""
        engine.apply_transfer_events(self._connector.cancel_loads(ids))

    def before_reset(self, engine: Host, preempt_running: bool) -> None:
        """End the saves of cached prefixes, with loads and kept pages if running requests are preempted too."""
        engine.apply_transfer_events(self._connector.reset(everything=preempt_running))

    def before_sleep(self, engine: Host) -> None:
        """Store what is unsaved while there is time."""
        engine.apply_transfer_events(self._connector.store_rest())

    def forget_stored(self) -> None:
        """Let every source forget what it has stored."""
        self._connector.forget_stored()

    def close(self) -> None:
        """End all loads, and store what is unsaved while there is time."""
        self._connector.close()


class TransferExecutor:
    """Hands the orders of each plan to the connector and its requests to another executor."""

    def __init__(self, executor: Launcher, connector: KVConnector) -> None:
        self.executor = executor
        self.connector = connector

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Begin the plan's orders, then launch its requests. A plan of orders only is over at once."""
        if plan.transfers is not None:
            self.connector.begin_transfers(plan.transfers)
        if not plan.request_ids:
            return StepOutcome(lambda: StepResult.empty(plan.step))
        self.connector.begun(row.request_id for row in plan.new_rows)
        return self.executor.launch(plan)

    def recover(self) -> None:
        """Run plans again after a failure."""
        self.executor.recover()

    def close(self) -> None:
        """Close the other executor."""
        self.executor.close()
