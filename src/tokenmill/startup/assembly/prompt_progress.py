"""Progress of prompts: tell a few times a second how far a prompt is computed, for the requests that ask.

The seconds left follow from the pace of the prompt's own steps so far: these also run what else is in the batch, which
a table of lone steps could not know. Before its first step has ended, the pace is that of the prompt that ran last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from tokenmill.core.extension import EngineExtension, Host
from tokenmill.core.messages import AddRequest, PromptProgress, TokenOutput
from tokenmill.core.request import Request
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.startup.assembly.capability import Capability

# Seconds between two reports on one request, at least.
INTERVAL = 0.25


@dataclass(slots=True)
class _Watched:
    """A prompt that is being computed: when that began, behind how many tokens, and when it was last told of."""

    began: float = 0.0
    num_before: int = -1
    told: float = 0.0


class ProgressReports(EngineExtension):
    """Reports on the prompts of requests that ask, from their first step to their first token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._pace: float | None = None  # seconds a token

    def arrived(self, message: AddRequest) -> None:
        """Watch a request that asks."""
        if message.wants_progress:
            self._watched[message.id] = _Watched()

    def poll(self, engine: Host) -> Sequence[TokenOutput]:
        """Return the reports that are due."""
        if not self._watched:
            return ()
        now, requests = self._clock(), engine.requests
        for one in [one for one in self._watched if one in requests and requests[one].num_output_tokens]:
            del self._watched[one]
        watched = ((requests[one], seen) for one, seen in self._watched.items() if one in requests)
        return [output for request, seen in watched if (output := self._report(request, seen, now)) is not None]

    def released(self, ended: Sequence[str], alive: Container[str]) -> None:
        """Let go of requests that have ended."""
        for request_id in ended if self._watched else ():
            self._watched.pop(request_id, None)

    def _report(self, request: Request, seen: _Watched, now: float) -> TokenOutput | None:
        """Return a report on a prompt that runs; None: none is due, or it does not run yet."""
        if request.row is None or now - seen.told < INTERVAL:
            return None
        num_computed = min(request.num_computed_tokens, request.num_prompt_tokens)
        if num_computed < seen.num_before or seen.num_before < 0:  # it begins, perhaps again after a preemption
            seen.began, seen.num_before = now, num_computed
        if num_run := num_computed - seen.num_before:
            self._pace = (now - seen.began) / num_run
        seen.told = now
        left = None if self._pace is None else self._pace * (request.num_prompt_tokens - num_computed)
        progress = PromptProgress(request.num_prompt_tokens, request.num_cached_tokens, num_computed, left)
        return TokenOutput(request.id, [], progress=progress)


class PromptsInProgress(Capability):
    """Every engine can tell of its prompts; it watches none that is not asked about."""

    def engine_extensions(self, scheduler: EngineScheduler) -> Sequence[EngineExtension]:
        """Return the reports."""
        return [ProgressReports()]
