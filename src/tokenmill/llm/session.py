"""`Session`: a conversation with the engine whose KV stays in memory from one turn to the next.

Each `send` appends to all that was said before; nothing of it is computed again, not even looked up. Between turns the
session keeps its row and pages, unless others would have to wait for ever.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, Self

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import EngineReady
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm.outputs import CompletionOutput, RequestOutput

_ENDS = (FinishReason.ABORT, FinishReason.ERROR)


class SessionHost(Protocol):
    """What a session needs of the engine around it."""

    info: EngineReady

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""

    def add_input(self, session_id: str | None, token_ids: list[int], params: SamplingParams) -> str:
        """Start a session (no id) or give it its next input; returns the session's id.

        Raises:
            InvalidRequest: the context has no room for it, or too much waits already.
        """

    def follow_turn(self, session: Session, turn: RequestOutput, params: SamplingParams) -> None:
        """Let what comes from now on fill up this turn, and tell the session when it has ended."""

    def step(self) -> object:
        """Advance all that runs."""

    def end_session(self, session_id: str) -> None:
        """Give up what the session holds."""


class Session:
    """Made by `LLM.session()`; a context manager.

    The last token of a turn, its stop token for instance, was sampled but never run, and is not part of what the next
    turn sees: append it to the next input where the model's format wants it there.
    """

    def __init__(self, host: SessionHost) -> None:
        self._host = host
        self._id: str | None = None
        # The turns that are not over, in order: the first one runs.
        self._turns: deque[tuple[RequestOutput, SamplingParams]] = deque()
        self._last: CompletionOutput | None = None
        self._is_closed = False

    def send(self, prompt: str | list[int], params: SamplingParams | None = None) -> CompletionOutput:
        """Append a text or token ids and generate until the turn ends.

        Raises:
            InvalidRequest: see `submit`.
        """
        output = self.submit(prompt, params)
        try:
            while output.finish_reason is None:
                self._host.step()
        except BaseException:
            self.close()  # a turn that was interrupted cannot be continued
            raise
        return output

    def submit(self, prompt: str | list[int], params: SamplingParams | None = None) -> CompletionOutput:
        """Append a text or token ids; what they lead to fills up as `LLM.step` is called.

        Input that comes while a turn runs is taken when that turn ends. If the context has no room for it by then, it
        ends the session with finish reason `error`; what came after it ends with `abort`.

        Raises:
            InvalidRequest: the session has ended, the input is empty, or the context has no room for it; too many
                inputs wait for the end of a turn; stop strings and n > 1 do not exist here.
        """
        params = params or SamplingParams()
        if self._is_closed or (self._last is not None and self._last.finish_reason in _ENDS):
            raise InvalidRequest("the session is closed")
        if params.stop or params.n > 1:
            raise InvalidRequest("a session has no stop strings and no n; use stop_token_ids")
        if params.structured_outputs is not None:
            raise InvalidRequest("a session has no structured outputs", "structured_outputs")
        token_ids = self._host.encode(prompt) if isinstance(prompt, str) else list(prompt)
        _check_input(token_ids, params, self._host.info.vocab_size)
        self._id = self._host.add_input(self._id, token_ids, params)
        self._last = CompletionOutput(0)
        self._turns.append((RequestOutput(token_ids, [self._last], [self._id]), params))
        if len(self._turns) == 1:
            self._host.follow_turn(self, *self._turns[0])
        return self._last

    def turn_ended(self, reason: FinishReason) -> None:
        """For the host: the first of the turns is over."""
        self._turns.popleft()
        if reason in _ENDS:
            self._end_turns()
        elif self._turns:
            self._host.follow_turn(self, *self._turns[0])

    def _end_turns(self) -> None:
        for turn, _ in self._turns:
            turn.outputs[0].finish_reason = turn.outputs[0].finish_reason or FinishReason.ABORT
        self._turns.clear()

    def close(self) -> None:
        """End the session; its row and pages return."""
        if self._id is not None and not self._is_closed:
            self._end_turns()
            self._host.end_session(self._id)
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_input(token_ids: list[int], params: SamplingParams, vocab_size: int) -> None:
    if not token_ids or not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise InvalidRequest(f"the input must be one or more token ids below {vocab_size}", "prompt")
    params.check_vocabulary(vocab_size)
    for name in ("prompt_logprobs", "bad_words"):
        if getattr(params, name):
            raise InvalidRequest(f"a session takes no {name}", name)
