"""Join the engine and the text processor of an `LLM` without sockets, and put the engine to sleep.

Threads take turns: the thread that has one may run a step for all, and each request's deltas go to its own inbox.
"""

from __future__ import annotations

import dataclasses
import gc
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenmill.config.configs import EngineConfig
from tokenmill.core import messages
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.errors import InvalidRequest, TokenMillError, Unavailable
from tokenmill.core.media import with_placeholders
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.ipc.interrupts import interrupts_deferred
from tokenmill.llm.adapters import LoRARequest, NamedAdapters
from tokenmill.llm.outputs import RequestOutput
from tokenmill.llm.turns import Turns
from tokenmill.model.adapters.requests import AdapterRequests
from tokenmill.platform.select import select_platform
from tokenmill.serving.frontend.processor_loading import load_text_processor
from tokenmill.serving.frontend.text_processor import Routed
from tokenmill.startup.assembly.loading import LoadedModel
from tokenmill.startup.assembly.setup import BuiltEngine, build_engine

# What vLLM calls the two parts that wake up.
TAGS = frozenset({"weights", "kv_cache"})

Inbox = deque[messages.TextOutput]
"""Outputs of steps for the requests of one call that its reader has not taken yet."""

TurnEnded = Callable[[FinishReason], None]
"""Called with the reason why the current turn of a session has ended."""


class _Open(NamedTuple):
    """The target of a request's deltas: a continuation of a result, or of the current turn of a session."""

    output: RequestOutput
    number: int
    inbox: Inbox | None = None
    turn_ended: TurnEnded | None = None


class LocalEngine:
    """Starts requests and updates their results; any thread may call it.

    Attributes:
        turns: the lock of the thread that is in it; hold it around several calls that belong together.
        info: the engine that was built, and is built again at the same size.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Build the engine; raise InvalidCheckpoint or InvalidConfig if this machine cannot serve the model."""
        self.turns = Turns()
        self._platform = select_platform(config.device)
        built = build_engine(config, platform=self._platform)
        self.info = built.ready
        self._config = dataclasses.replace(config, num_pages=self.info.num_pages, max_model_len=self.info.max_model_len)
        self._text = load_text_processor(Path(self.info.model), config)
        self._text.process(self.info)
        self.tokenizer = self._text.tokenizer
        self._open: dict[str, _Open] = {}
        self._adapters = NamedAdapters(self._look_at)
        # Asleep there is no engine; in the deeper sleep there is no model either.
        self._built: BuiltEngine | None = built
        self._model: LoadedModel | None = built.model
        self._is_closed = False
        self._num_arrived = 0
        self._awaited = TAGS

    @property
    def engine(self) -> Engine:
        """The engine, while it is awake.

        Raises:
            InvalidRequest: it sleeps, or is closed.
        """
        if self._is_closed:
            raise InvalidRequest("this LLM is closed: make a new one, and close it after the last call")
        if self._built is None:
            raise InvalidRequest("the engine is asleep: call wake_up() first")
        return self._built.engine

    @property
    def has_open(self) -> bool:
        """True if requests are open that a step may advance."""
        return bool(self._open)

    def start(self, message: messages.GenerateText, output: RequestOutput, inbox: Inbox | None = None) -> None:
        """Start the requests of a message; the result fills up with the steps of any thread.

        Args:
            inbox: gets all their deltas, too.

        Raises:
            InvalidRequest: they can never run.
        """
        self._start(message, {one: _Open(output, index, inbox) for index, one in enumerate(message.ids)})

    def start_texts(self, message: messages.GenerateText, outputs: Sequence[RequestOutput], inbox: Inbox) -> None:
        """Start the requests of texts, each of which has a result of its own; as `start`."""
        self._start(message, {output.request_id: _Open(output, 0, inbox) for output in outputs})

    def _start(self, message: messages.GenerateText, opened: dict[str, _Open]) -> None:
        with self.turns:
            self.engine  # noqa: B018 - before anything is open
            self._open.update(opened)
            try:
                self._deliver(message)
            except TokenMillError:
                for request_id in message.ids:
                    self._open.pop(request_id, None)
                raise

    def step(self) -> list[messages.TextOutput]:
        """Run one step of the engine; return the deltas of all open requests."""
        with self.turns, interrupts_deferred():
            return self._publish(self.engine.step())

    def advance(self, unfinished: dict[str, RequestOutput], inbox: Inbox) -> tuple[list[messages.TextOutput], int]:
        """Run one step, unless steps of other threads have already brought deltas or ended all these results.

        Args:
            unfinished: results by the engine's ids of their continuations; those that have ended are taken out.

        Returns:
            The deltas that were in the inbox, and the number of results that have ended with them.
        """
        with self.turns:
            if not inbox and not all(output.finished for output in unfinished.values()):
                self.step()
            deltas = [inbox.popleft() for _ in range(len(inbox))]
            ids = [delta.id for delta in deltas if delta.finish_reason is not None]
            if not deltas:
                ids = [request_id for request_id, output in unfinished.items() if output.finished]
            changed = [output for output in (unfinished.pop(one, None) for one in ids) if output is not None]
            return deltas, len({output.request_id for output in changed if output.finished})

    def abort(self, outputs: Iterable[RequestOutput]) -> None:
        """Abort the open requests of these results, which an exception or an early end of a loop has left.

        If a loop is garbage-collected inside a step, its requests are aborted at the end of that step.
        """
        outputs = list(outputs)
        if any(request_id in self._open for output in outputs for request_id in output.request_ids):
            self.turns.do_between(lambda: self._abort(outputs))

    def _abort(self, outputs: Sequence[RequestOutput]) -> None:
        ids = [request_id for output in outputs for request_id in output.request_ids if request_id in self._open]
        if not ids:
            return
        self._deliver(messages.AbortRequests(ids))
        for request_id in ids:
            opened = self._open.pop(request_id)
            opened.output.outputs[opened.number].finish_reason = FinishReason.ABORT

    def add_input(self, session_id: str | None, token_ids: list[int], params: SamplingParams) -> str:
        """Start a session (no id) or give it its next input; return the session's id.

        Raises:
            InvalidRequest: the context has no room for it, or too many inputs wait already.
        """
        with self.turns:
            if session_id is not None:
                self.engine.extend(session_id, token_ids, params)
                return session_id
            new_id = uuid.uuid4().hex
            message = messages.AddRequest(id=new_id, prompt_token_ids=token_ids, params=params, is_resumable=True)
            for refusal in self.engine.add(message):
                raise InvalidRequest(refusal.error or "the input cannot be served", "prompt")
            return message.id

    def follow_turn(self, turn: RequestOutput, params: SamplingParams, turn_ended: TurnEnded) -> None:
        """Send coming deltas of a session to this turn, and tell the session when the turn has ended."""
        (session_id,) = turn.request_ids
        self._text.expect(session_id, params, len(turn.prompt_token_ids))
        self._open[session_id] = _Open(turn, 0, turn_ended=turn_ended)

    def end_session(self, session_id: str) -> None:
        """End a session and free what it holds."""
        with self.turns:
            self._open.pop(session_id, None)
            if self._built is not None:  # asleep, the session has failed before
                self._deliver(messages.AbortRequests([session_id]))

    def sleep(self, level: int) -> None:
        """Give back memory: level 1 that of KV, and of weights on a GPU or in several ranks; level 2 that of both.

        Raises:
            InvalidRequest: the engine has requests, or a step log, which another engine cannot continue.
        """
        if level not in (1, 2):
            raise InvalidRequest(f"level must be 1 or 2, got {level}", "level")
        if self._config.step_log is not None:
            raise InvalidRequest("an engine with a step_log cannot sleep: its log would begin anew")
        with self.turns:
            if self._built is not None:
                if count := len(self.engine.scheduler.requests):
                    raise InvalidRequest(f"{count} requests or sessions are open: let them end before sleep()")
                self._num_arrived = self.engine.num_arrived
                self.engine.close()
            self._built, self._awaited = None, TAGS
            if level == 2 or self._platform.is_accelerator or self._config.num_ranks > 1:
                # Of several ranks, the others have ended with the engine, and so has what binds them.
                self._model = None
            gc.collect()
            self._platform.available_bytes()  # on a GPU this gives back what torch keeps for later

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take the memory again once both parts are to wake up; weights that were given back are read again.

        Raises:
            InvalidRequest: a tag is unknown.
            OutOfMemory, InvalidConfig, InvalidCheckpoint: as at its construction; it goes on sleeping.
        """
        wanted = TAGS if tags is None else frozenset(tags)
        if wanted - TAGS:
            raise InvalidRequest(f"tags are {', '.join(sorted(TAGS))}, got {', '.join(sorted(wanted))}", "tags")
        with self.turns:
            self._awaited -= wanted
            if self._built is None and not self._awaited:
                # As many pages as there were, whatever others have taken meanwhile.
                self._built = build_engine(self._config, platform=self._platform, model=self._model)
                self._built.engine.num_arrived = self._num_arrived
                self._model = self._built.model

    def close(self) -> None:
        """End all requests and free the engine's thread."""
        with self.turns:
            self._abort([entry.output for entry in self._open.values()])
            if self._built is not None:
                self._built.engine.close()
            self._is_closed = True

    def find_adapter(self, request: LoRARequest | None) -> AdapterRef | None:
        """Return the adapter that a request names; None for no adapter. Raises as `NamedAdapters.find`."""
        with self.turns:
            return self._adapters.find(request)

    def _look_at(self, name: str, path: str) -> AdapterRef:
        adapters = self.engine.extension(AdapterRequests)
        if adapters is None:
            raise InvalidRequest("lora_request needs LLM(enable_lora=True)", "lora_request")
        return adapters.look_at(name, path)

    def _deliver(self, message: messages.TextMessage) -> list[messages.TextOutput]:
        """Let the text processor handle a message and pass on the messages that result; return the texts."""
        return self._route(self._text.process(message))

    def _route(self, routed: Routed) -> list[messages.TextOutput]:
        deltas: list[messages.TextOutput] = []
        for reply in routed.to_api:
            if isinstance(reply, messages.RequestRejected):
                kind = Unavailable if reply.status == Unavailable.status else TokenMillError
                raise InvalidRequest(reply.error, reply.param) if reply.status < 500 else kind(reply.error)
            if isinstance(reply, messages.TextOutputs):
                deltas.extend(self._take(delta) for delta in reply.outputs)
        for message in routed.to_engine:
            if isinstance(message, messages.AbortRequests):
                deltas.extend(self._publish(self.engine.abort(message.ids)))
            elif isinstance(message, messages.AddRequest):
                self._open[message.id].output.prompt_token_ids = _shown(message)
                deltas.extend(self._publish(self.engine.add(message)))
        return deltas

    def _publish(self, outputs: list[messages.TokenOutput]) -> list[messages.TextOutput]:
        return self._deliver(messages.StepOutputs(0, outputs)) if outputs else []

    def _take(self, delta: messages.TextOutput) -> messages.TextOutput:
        opened = self._open[delta.id]
        if opened.inbox is not None:
            opened.inbox.append(delta)  # first: a finished result that is seen has all of it in the inbox
        opened.output.add(opened.number, delta)
        if delta.finish_reason is not None:
            del self._open[delta.id]
            if opened.turn_ended is not None:
                opened.turn_ended(delta.finish_reason)
        return delta


def _shown(message: messages.AddRequest) -> list[int]:
    """Return a prompt's token ids as the model gets them."""
    if not message.media:
        return message.prompt_token_ids
    return list(with_placeholders(message.prompt_token_ids, [one.span for one in message.media]).tolist())
