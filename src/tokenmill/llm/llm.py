"""`LLM`: the whole engine in this process, for scripts and batch work. No server, no sockets, no other process.

It sends the same messages that the server's processes exchange, straight from the text processor to the engine and
back. One of the two places that know both sides (the other is the engine process).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tokenmill.config import EngineConfig
from tokenmill.core.errors import InvalidConfig, InvalidRequest, TokenMillError
from tokenmill.core.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    GenerateText,
    RequestRejected,
    StepOutputs,
    TextMessage,
    TextOutput,
    TextOutputs,
    TokenOutput,
)
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.engine.setup import build_engine
from tokenmill.frontend.text_processor import Routed, load_text_processor
from tokenmill.ipc.interrupts import interrupts_deferred
from tokenmill.llm.outputs import CompletionOutput, RequestOutput
from tokenmill.llm.progress import ProgressBar
from tokenmill.llm.session import Session
from tokenmill.model_files import check_tokenizer

Prompt = str | list[int]
Conversation = list[dict[str, Any]]


class _Open(NamedTuple):
    """Where the deltas of a request go: to a continuation of a result, or of the turn that a session is at."""

    output: RequestOutput
    number: int
    session: Session | None = None


class LLM:
    """A model, ready to generate.

    Args:
        model: a checkpoint folder or a hub id; none: the bundled demo model.
        engine_options: fields of `EngineConfig`, e.g. `max_model_len=4096, dtype="float32"`.

    Raises:
        InvalidCheckpoint, InvalidConfig: the model cannot be served on this machine; says what to change.
    """

    def __init__(self, model: str | Path = "", **engine_options: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        for name in engine_options.keys() - known:
            raise InvalidConfig(f"LLM has no option {name!r}; there are: {', '.join(sorted(known))}")
        config = EngineConfig(model=str(model) or str(demo_model_path()), **engine_options).resolve()
        if config.kv_events() is not None:
            raise InvalidConfig("kv_events_config needs a server: LLM opens no sockets")
        check_tokenizer(config.model, config.tokenizer)
        built = build_engine(config)
        self.info = built.ready
        self._engine = built.engine
        self._text = load_text_processor(Path(built.ready.model), config)
        self._text.process(built.ready)
        self._open: dict[str, _Open] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress_bar: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; texts or lists of token ids.

        Args:
            params: for all prompts, or one for each.

        Returns:
            One result for each prompt, in their order.

        Raises:
            InvalidRequest: a prompt that can never run; nothing has been generated then.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: list[Any] = [prompts] if single else list(prompts)
        return self._run(batch, params, use_progress_bar)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress_bar: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer each conversation: lists of `{"role": ..., "content": ...}`, rendered by the model's chat template.

        Args:
            template_options: `tools`, and whatever else the template knows.

        Raises:
            InvalidRequest: as `generate`, or the template refuses the messages.
        """
        single = bool(messages) and isinstance(messages[0], dict)
        batch: list[Any] = [messages] if single else list(messages)
        return self._run(batch, params, use_progress_bar, template_options)

    def stream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[TextOutput]:
        """Continue one prompt or conversation, delta by delta. Leaving the loop early aborts the request."""
        output = self.submit(prompt, params, template_options)
        try:
            while not output.is_finished:
                yield from [delta for delta in self.step() if delta.id in output.request_ids]
        finally:
            self._abort([output])

    def session(self) -> Session:
        """Open a session: turns that append to each other, with nothing computed twice."""
        return Session(self)

    def submit(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> RequestOutput:
        """Add a prompt to those that `step` advances. The result fills up as they go; see `is_finished`.

        Raises:
            InvalidRequest: it can never run.
        """
        params = params or SamplingParams()
        options = dict(template_options or {})
        ids = [uuid.uuid4().hex for _ in range(params.n)]
        message = GenerateText(
            ids=ids,
            params=params,
            tools=options.pop("tools", None),
            template_kwargs=options,
            wants_prompt=params.prompt_logprobs is not None,
        )
        _set_prompt(message, prompt)
        output = RequestOutput([], [CompletionOutput(index) for index in range(params.n)], ids)
        self._open.update({request_id: _Open(output, index) for index, request_id in enumerate(ids)})
        try:
            self._deliver(message)
        except TokenMillError:
            for request_id in ids:
                self._open.pop(request_id, None)
            raise
        return output

    def step(self) -> list[TextOutput]:
        """Run one step of the engine; returns the deltas it brought to all that is open."""
        with interrupts_deferred():
            return self._publish(self._engine.step())

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self._text.tokenizer.encode(text)

    def add_input(self, session_id: str | None, token_ids: list[int], params: SamplingParams) -> str:
        """See `SessionHost`."""
        if session_id is not None:
            self._engine.extend(session_id, token_ids, params)
            return session_id
        message = AddRequest(id=uuid.uuid4().hex, prompt_token_ids=token_ids, params=params, is_resumable=True)
        for refusal in self._engine.add(message):
            raise InvalidRequest(refusal.error or "the input cannot be served", "prompt")
        return message.id

    def follow_turn(self, session: Session, turn: RequestOutput, params: SamplingParams) -> None:
        """See `SessionHost`."""
        (session_id,) = turn.request_ids
        self._text.expect(session_id, params, len(turn.prompt_token_ids))
        self._open[session_id] = _Open(turn, 0, session)

    def end_session(self, session_id: str) -> None:
        """See `SessionHost`."""
        self._open.pop(session_id, None)
        self._deliver(AbortRequests([session_id]))

    def stats(self) -> EngineStats:
        """Counters since start and what is in use now: rows, pages, cache hits, preemptions."""
        return self._engine.stats()

    def close(self) -> None:
        """End what runs and free the engine's thread."""
        self._abort([entry.output for entry in self._open.values()])
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        batch: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_progress_bar: bool,
        template_options: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        each = [params] * len(batch) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(batch):
            raise InvalidRequest(f"{len(batch)} prompts, but {len(each)} sampling parameters")
        outputs: list[RequestOutput] = []
        try:
            for prompt, own in zip(batch, each, strict=True):
                outputs.append(self.submit(prompt, own, template_options))
            unfinished = outputs
            with ProgressBar(len(outputs), use_progress_bar) as progress:
                while unfinished:
                    deltas = self.step()
                    if any(delta.finish_reason is not None for delta in deltas):
                        unfinished = [output for output in unfinished if not output.is_finished]
                    num_tokens = sum(len(delta.token_ids) for delta in deltas)
                    progress.update(len(outputs) - len(unfinished), num_tokens)
        finally:
            self._abort(outputs)
        return outputs

    def _deliver(self, message: TextMessage) -> list[TextOutput]:
        """Let the text processor handle a message and pass on what it led to; returns the texts."""
        return self._route(self._text.process(message))

    def _route(self, routed: Routed) -> list[TextOutput]:
        deltas: list[TextOutput] = []
        for reply in routed.to_api:
            if isinstance(reply, RequestRejected):
                raise InvalidRequest(reply.error, reply.param) if reply.status < 500 else TokenMillError(reply.error)
            if isinstance(reply, TextOutputs):
                deltas.extend(self._take(delta) for delta in reply.outputs)
        for message in routed.to_engine:
            if isinstance(message, AbortRequests):
                deltas.extend(self._publish(self._engine.abort(message.ids)))
            elif isinstance(message, AddRequest):
                self._open[message.id].output.prompt_token_ids = message.prompt_token_ids
                deltas.extend(self._publish(self._engine.add(message)))
        return deltas

    def _publish(self, outputs: list[TokenOutput]) -> list[TextOutput]:
        return self._deliver(StepOutputs(0, outputs)) if outputs else []

    def _take(self, delta: TextOutput) -> TextOutput:
        output, index, session = self._open[delta.id]
        output.add(index, delta)
        if delta.finish_reason is not None:
            del self._open[delta.id]
            if session is not None:
                session.turn_ended(delta.finish_reason)
        return delta

    def _abort(self, outputs: Sequence[RequestOutput]) -> None:
        """End what is still open of these: an exception or an early end of a loop left it, and nobody waits for it."""
        ids = [request_id for output in outputs for request_id in output.request_ids if request_id in self._open]
        if not ids:
            return
        self._deliver(AbortRequests(ids))
        for request_id in ids:
            output, index, _ = self._open.pop(request_id)
            output.outputs[index].finish_reason = FinishReason.ABORT


def _set_prompt(message: GenerateText, prompt: Prompt | Conversation) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], dict):
        message.messages = prompt
    elif all(isinstance(token_id, int) for token_id in prompt):
        message.token_ids = list(prompt)  # type: ignore[arg-type]
    else:
        raise InvalidRequest("a prompt is a text, a list of token ids, or a list of messages", "prompt")
