"""`Session`: a conversation with the engine whose KV stays in memory from one turn to the next.

Each `send` appends to all that was said before; nothing of it is computed again, not even looked up. Between turns the
session keeps its row and pages, unless others would have to wait for ever.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tokenmill.errors import InvalidRequest
from tokenmill.frontend.detokenizer import IncrementalDetokenizer
from tokenmill.messages import AddRequest, TokenOutput
from tokenmill.request import FinishReason
from tokenmill.request_output import CompletionOutput
from tokenmill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.engine.engine import Engine
    from tokenmill.frontend.tokenizer import Tokenizer


class Session:
    """Made by `LLM.session()`; a context manager.

    The last token of a turn, its stop token for instance, was sampled but never run, and is not part of what the next
    turn sees: append it to the next input where the model's format wants it there.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, run_others: Callable[[list[TokenOutput]], object]) -> None:
        self._id = uuid.uuid4().hex
        self._engine = engine
        self._tokenizer = tokenizer
        self._run_others = run_others
        self._is_open = False
        self._is_closed = False

    def send(self, prompt: str | list[int], params: SamplingParams | None = None) -> CompletionOutput:
        """Append a text or token ids and generate until the turn ends.

        Raises:
            InvalidRequest: the session is closed, the input is empty, or the context has no room for it; stop strings
                and n > 1 do not exist here.
        """
        params = params or SamplingParams()
        if params.stop or params.n > 1:
            raise InvalidRequest("a session has no stop strings and no n; use stop_token_ids")
        params.check_vocabulary(self._engine.limits.vocab_size)
        token_ids = self._encode(prompt)
        if self._is_closed:
            raise InvalidRequest("the session is closed")
        if self._is_open:
            self._engine.extend(self._id, token_ids, params)
        else:
            message = AddRequest(id=self._id, prompt_token_ids=token_ids, params=params, is_resumable=True)
            for refusal in self._engine.add(message):
                raise InvalidRequest(refusal.error or "the prompt cannot be served", "prompt")
            self._is_open = True
        return self._finish_turn(params)

    def close(self) -> None:
        """End the session; its row and pages return."""
        if self._is_open and not self._is_closed:
            self._engine.abort([self._id])
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: str | list[int]) -> list[int]:
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab_size = self._engine.limits.vocab_size
        if not token_ids or not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise InvalidRequest(f"the input must be one or more token ids below {vocab_size}", "prompt")
        return token_ids

    def _finish_turn(self, params: SamplingParams) -> CompletionOutput:
        output = CompletionOutput(0)
        detokenizer = IncrementalDetokenizer(self._tokenizer, params.skip_special_tokens)
        for delta in self._own_outputs():
            output.token_ids.extend(delta.token_ids)
            output.finish_reason, output.stop_reason, output.error = delta.finish_reason, delta.stop_reason, delta.error
            if delta.logprobs is not None:
                output.logprobs = [*(output.logprobs or []), *delta.logprobs]
            is_stop_token = delta.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output
            output.text += detokenizer.push(delta.token_ids[:-1] if is_stop_token else delta.token_ids)
        output.text += detokenizer.finish()
        self._is_closed = output.finish_reason is FinishReason.ERROR
        return output

    def _own_outputs(self) -> Iterator[TokenOutput]:
        while True:
            outputs = self._engine.step()
            self._run_others([output for output in outputs if output.id != self._id])
            for output in outputs:
                if output.id == self._id:
                    yield output
                    if output.finish_reason is not None:
                        return
