"""Sessions: requests that go on with further input when a turn has ended, over the KV that they keep."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TokenOutput
from tokenmill.core.request import FinishReason, Request, TurnInput
from tokenmill.engine.scheduler.state import SchedulerState

# Inputs of a session that may wait for the end of its turn.
MAX_QUEUED_INPUTS = 16


class Sessions:
    """Keeps sessions between two turns, and starts their next ones.

    Args:
        check: raises InvalidRequest for a request that could never run to so many tokens.

    Attributes:
        due: sessions that may be paused and have further input.
    """

    def __init__(self, state: SchedulerState, check: Callable[[Request, int], None]) -> None:
        self.due: list[Request] = []
        self._state = state
        self._check = check

    def extend(self, request_id: str, turn: TurnInput) -> None:
        """Continue a session with further input: at once if it is paused, else when its turn ends.

        Raises:
            InvalidRequest: no such session, too many inputs wait already, or the context has no room for this one.
        """
        request = self._state.requests.get(request_id)
        if request is None or request.is_finished or not request.is_resumable:
            raise InvalidRequest("the session has ended, or its last turn runs")
        if any(queued.is_last for queued in request.inputs):
            raise InvalidRequest("the session has its last input already")
        if len(request.inputs) == MAX_QUEUED_INPUTS:
            raise InvalidRequest(f"{MAX_QUEUED_INPUTS} inputs of this session wait for the end of its turn already")
        self._check(request, request.max_tokens_with(turn))
        request.inputs.append(turn)
        if request.is_paused:
            self.due.append(request)

    def end_turn(self, request: Request, is_cut: bool = False) -> None:
        """Take in that a request has ended, or the turn of a session. `is_cut`: see `SchedulerState.rewind`."""
        if request.inputs:
            self.due.append(request)
        if request.is_paused:
            self._state.rewind(request, is_cut)

    def begin_turns(self) -> list[TokenOutput]:
        """Resume paused sessions that have further input.

        Returns:
            The terminal outputs of sessions whose context has no room for it.
        """
        due, self.due = self.due, []
        return [output for request in due if request.is_paused for output in self._begin_turn(request)]

    def _begin_turn(self, request: Request) -> list[TokenOutput]:
        turn = request.inputs.popleft()
        try:
            self._check(request, request.max_tokens_with(turn))
            request.extend(turn)
        except InvalidRequest as error:
            self._state.end_request(request, FinishReason.ERROR)
            return [TokenOutput(request.id, [], FinishReason.ERROR, error=str(error))]
        self._state.begin_turn(request)
        return []
