"""`Session`: a conversation with the engine whose KV stays in memory from one turn to the next.

Each `send` appends to all that was said before; nothing of it is computed again, not even looked up. Between turns the
session keeps its row and pages, unless others would have to wait for ever.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from tokenmill.errors import InvalidRequest
from tokenmill.request import FinishReason
from tokenmill.request_output import CompletionOutput
from tokenmill.sampling_params import SamplingParams


class Turns(Protocol):
    """What a session needs of the engine around it."""

    def begin_turn(self, prompt: str | list[int], params: SamplingParams, session_id: str | None) -> str:
        """Start the first turn (no id) or a further one; returns the session's id."""

    def finish_turn(self, session_id: str) -> CompletionOutput:
        """Run until the turn ends."""

    def end_session(self, session_id: str) -> None:
        """Give up what the session holds."""


class Session:
    """Made by `LLM.session()`; a context manager.

    The last token of a turn, its stop token for instance, was sampled but never run, and is not part of what the next
    turn sees: append it to the next input where the model's format wants it there.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._id: str | None = None
        self._is_closed = False

    def send(self, prompt: str | list[int], params: SamplingParams | None = None) -> CompletionOutput:
        """Append a text or token ids and generate until the turn ends.

        Raises:
            InvalidRequest: the session is closed, the input is empty, or the context has no room for it; stop strings
                and n > 1 do not exist here.
        """
        params = params or SamplingParams()
        if self._is_closed:
            raise InvalidRequest("the session is closed")
        if params.stop or params.n > 1:
            raise InvalidRequest("a session has no stop strings and no n; use stop_token_ids")
        if params.structured_outputs is not None:
            raise InvalidRequest("a session has no structured outputs", "structured_outputs")
        self._id = self._turns.begin_turn(prompt, params, self._id)
        try:
            output = self._turns.finish_turn(self._id)
        except BaseException:
            self.close()  # a turn that was interrupted cannot be continued
            raise
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._is_closed = True
        return output

    def close(self) -> None:
        """End the session; its row and pages return."""
        if self._id is not None and not self._is_closed:
            self._turns.end_session(self._id)
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
