"""Define `Session`, a conversation with the engine whose KV stays in memory from one turn to the next.

Each `send` appends to all turns before it, which are neither computed nor looked up again. Between turns the session
keeps its row and pages, unless other requests would wait for ever. With a disk tier it finds them again there.
"""

from __future__ import annotations

from collections import deque
from typing import Self

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm.local_engine import LocalEngine
from tokenmill.llm.outputs import CompletionOutput, RequestOutput

_ENDS = (FinishReason.ABORT, FinishReason.ERROR)


class Session:
    """A conversation in turns, made by `LLM.session()`; a context manager.

    The last token of a turn, its stop token for instance, was sampled but never run, and is not part of what the next
    turn sees: append it to the next input where the model's format wants it there.
    """

    def __init__(self, engine: LocalEngine, default_params: SamplingParams) -> None:
        """Open a session; turns without parameters use `default_params`."""
        self._engine = engine
        self._default_params = default_params
        self._id: str | None = None
        # The turns that are not over, in order: the first one runs.
        self._turns: deque[tuple[RequestOutput, SamplingParams]] = deque()
        self._last: CompletionOutput | None = None
        self._is_closed = False

    def send(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> CompletionOutput:
        """Append a text or token ids and generate until the turn ends.

        Raises:
            InvalidRequest: see `submit`.
        """
        output = self.submit(prompt, sampling_params)
        try:
            while output.finish_reason is None:
                with self._engine.turns:
                    if output.finish_reason is None:  # another thread's step may have ended it
                        self._engine.step()
        except BaseException:
            self.close()  # a turn that was interrupted cannot be continued
            raise
        return output

    def submit(self, prompt: str | list[int], sampling_params: SamplingParams | None = None) -> CompletionOutput:
        """Append a text or token ids; the output fills up as `LLM.step` is called.

        Input that comes during a turn is taken when that turn ends. If the context has no room for it by then, it
        ends the session with finish reason `error`; what came after it ends with `abort`.

        Raises:
            InvalidRequest: the session has ended, the input is empty, or the context has no room for it; too many
                inputs wait for the end of a turn; the parameters have stop strings or n > 1.
        """
        params = sampling_params or self._default_params
        if self._is_closed or (self._last is not None and self._last.finish_reason in _ENDS):
            raise InvalidRequest("the session is closed")
        if params.stop or params.n > 1:
            raise InvalidRequest("a session has no stop strings and no n; use stop_token_ids")
        if params.structured_outputs is not None:
            raise InvalidRequest("a session has no structured outputs", "structured_outputs")
        token_ids = self._engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        _check_input(token_ids, params, self._engine.info.vocab_size)
        with self._engine.turns:
            self._id = self._engine.add_input(self._id, token_ids, params)
            self._last = CompletionOutput(0)
            self._turns.append((RequestOutput(self._id, token_ids, [self._last], [self._id]), params))
            if len(self._turns) == 1:
                self._engine.follow_turn(*self._turns[0], self.turn_ended)
            return self._last

    def turn_ended(self, reason: FinishReason) -> None:
        """Note that the first turn is over, and follow the next one; called by the engine."""
        self._turns.popleft()
        if reason in _ENDS:
            self._end_turns()
        elif self._turns:
            self._engine.follow_turn(*self._turns[0], self.turn_ended)

    def _end_turns(self) -> None:
        for turn, _ in self._turns:
            turn.outputs[0].finish_reason = turn.outputs[0].finish_reason or FinishReason.ABORT
        self._turns.clear()

    def close(self) -> None:
        """End the session and return its row and pages."""
        with self._engine.turns:
            if self._id is not None and not self._is_closed:
                self._end_turns()
                self._engine.end_session(self._id)
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
