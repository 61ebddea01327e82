"""The API process's client of the text workers and, through them, of the engines.

One asyncio loop owns it. Ids are random and made here, so no client can name another's request. Does not know HTTP or
sockets: it sends through `send` functions and is handed messages by `dispatch`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

from tokenmill.core.api_messages import PrefixNote
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidRequest, TokenMillError, Unavailable
from tokenmill.core.messages import (
    AbortRequests,
    AnswerNow,
    FromWorker,
    GenerateText,
    RequestRejected,
    TextOutput,
    TextOutputs,
    ToWorker,
)
from tokenmill.core.part_messages import EngineNews, Verdict
from tokenmill.core.request import FinishReason
from tokenmill.core.text_queries import (
    Decoded,
    DecodeTokens,
    Encoded,
    EncodeText,
    FindParsers,
    ParsersFound,
    TextQuery,
    TextReply,
)
from tokenmill.ipc.topology import request_mark
from tokenmill.serving.frontend.admission_control import AdmissionControl, AdmissionLimits
from tokenmill.serving.frontend.generation import Generation
from tokenmill.serving.frontend.open_request import NOBODY, Call, Caller, OpenRequest, RequestObserver, messages_again
from tokenmill.serving.frontend.worker_turns import WorkerTurns

KILLS_WORKERS = "the text worker died twice while it prepared this request; it is not tried again"

Send = Callable[[ToWorker], None]


class RejectedRequest(InvalidRequest):
    """A text worker's refusal, with the HTTP status that it chose."""

    def __init__(self, message: str, param: str | None, status: int, code: str | None = None) -> None:
        super().__init__(message, param)
        self.status = status
        self.code = code
        if status >= 500:
            self.type = TokenMillError.type


class EngineClient:
    """Starts, follows and aborts requests; spreads API calls over the text workers in turn."""

    def __init__(
        self,
        workers: Sequence[Send],
        observer: RequestObserver | None = None,
        limits: AdmissionLimits | None = None,
        seed: int = 0,
        first_worker: int = 0,
    ) -> None:
        """
        Args:
            seed: seeds the prompts that bring no seed, together with their number.
            first_worker: the index of the first of these workers among all text workers of the server.
        """
        self._workers = list(workers)
        self._retired: set[str] = set()
        self._ready: EngineReady | None = None
        self._seed = f"{first_worker}/{seed}" if first_worker else str(seed)
        self._first_worker = first_worker
        self._num_prompts = 0
        self._admission = AdmissionControl(limits or AdmissionLimits())
        self._turns = WorkerTurns(len(self._workers))
        self._observer = observer
        self._open: dict[str, OpenRequest] = {}
        self._calls: dict[str, Call] = {}
        self._failure: Exception | None = None

    @property
    def num_open(self) -> int:
        """Number of requests without a terminal output."""
        return len(self._open)

    @property
    def open_ids(self) -> list[str]:
        """Ids of the requests without a terminal output."""
        return list(self._open)

    @property
    def failure(self) -> Exception | None:
        """Error that stops all new requests, or None."""
        return self._failure

    async def start(self, ready: EngineReady, num_rows: int) -> None:
        """Send the engines' limits to every text worker, and return when all have loaded their tokenizers.

        `num_rows`: number of requests that can run at once, on all engines together.
        """
        self._ready = ready
        self._admission.num_rows = num_rows
        for send in self._workers:
            send(ready)
        # The reply to a decode of nothing shows that a worker has loaded: messages are handled in order.
        await asyncio.gather(*(self._call(DecodeTokens(_new_id(), []), worker) for worker in range(len(self._workers))))

    @property
    def num_workers(self) -> int:
        """Number of text workers."""
        return len(self._workers)

    @property
    def num_rows(self) -> int:
        """Number of requests that can run at once, on all engines together."""
        return self._admission.num_rows

    def avoid(self, worker: int, is_avoided: bool) -> None:
        """Give this text worker no calls while another is available; see `WorkerTurns.avoid`."""
        self._turns.avoid(worker, is_avoided)

    def generate(
        self, prompts: Sequence[GenerateText], caller: Caller = NOBODY, worker: int | None = None
    ) -> Generation:
        """Start the requests of each prompt; indices run over the prompts, then over n, or over the texts.

        Args:
            caller: the caller of this call.
            worker: the text worker that handles it; None: the next in turn.

        Raises:
            EngineDead: the engine has died, or no text worker answers.
            QueueFull: too many requests or tokens wait already.
            InvalidRequest: a value in a message or a template variable cannot be sent.
        """
        self._raise_failure()
        if not caller.is_background:
            self._admission.check(prompts, sum(not one.prompt.is_background for one in self._open.values()))
        # Before anything is sent: the engine may have begun by the time that this call goes on.
        arrived = time.monotonic()
        worker = self._turns.next(prompts[0].session) if worker is None else worker
        tenant = caller.tenant or _new_id()
        mark = request_mark(self._first_worker + worker)
        prompts = [self._accepted(prompt, mark, tenant, caller.is_background) for prompt in prompts]
        ids = [request_id for prompt in prompts for request_id in prompt.ids]
        generation = Generation(ids, lambda generation: self._leave(generation, worker))
        try:
            for prompt in prompts:
                self._send(worker, prompt)
        except InvalidRequest:
            self._send(worker, AbortRequests(ids))
            raise
        for prompt in prompts:
            if not caller.is_background:
                self._admission.enter(prompt)
            for request_id in prompt.ids:
                self._open[request_id] = OpenRequest(generation, caller, prompt, worker, arrived, arrived)
        return generation

    def _accepted(self, prompt: GenerateText, mark: str, tenant: str, is_background: bool) -> GenerateText:
        """Return the prompt with ids and a fixed seed, so that every engine that continues it draws the same tokens."""
        ids, params = [mark + _new_id() for _ in range(prompt.num_requests)], prompt.params
        if params.seed is None:
            digest = blake2b(f"{self._seed}/{self._num_prompts}".encode(), digest_size=8).digest()
            params = msgspec.structs.replace(params, seed=int.from_bytes(digest, "little", signed=True))
        self._num_prompts += 1
        return msgspec.structs.replace(prompt, ids=ids, params=params, tenant=tenant, is_background=is_background)

    @property
    def has_waiting(self) -> bool:
        """True while an interactive request waits for a first token, a row or pages."""
        interactive = [request for request in self._open.values() if not request.prompt.is_background]
        return bool(self._admission.num_queued) or not all(request.num_output_tokens for request in interactive)

    def remark(self) -> None:
        """Send every stream a sign of life, if its reader takes them."""
        for generation in {request.generation for request in self._open.values()}:
            generation.remark()

    def find(self, names: Iterable[str], owner: str) -> dict[str, list[list[str]]]:
        """Find this owner's open requests by call label or request id; return, for each name, their ids by call.

        Names must match in full. Clients choose labels, so several calls may have the same one.
        """
        calls: dict[str, dict[Generation, list[str]]] = {name: {} for name in names}
        for request_id, request in self._open.items():
            for name in {request_id, request.caller.label} & calls.keys() if request.caller.owner == owner else ():
                calls[name].setdefault(request.generation, []).append(request_id)
        return {name: list(found.values()) for name, found in calls.items()}

    def notes(self, ids: Iterable[str]) -> dict[str, PrefixNote]:
        """Return the notes about those of these requests whose cached prefix there is something to say about."""
        found = {one: self._open[one].note for one in ids if one in self._open}
        return {one: note for one, note in found.items() if note is not None}

    def abort(self, ids: Sequence[str]) -> None:
        """End those of these requests that are open; their readers get a last delta that says so."""
        for request_id in ids:
            request = self._open.get(request_id)
            if request is None:
                continue
            num_prompt_tokens = request.num_prompt_tokens
            self._forget(request_id, FinishReason.ABORT)
            self._workers[request.worker](AbortRequests([request_id]))
            request.generation.deliver(TextOutput(request_id, "", [], num_prompt_tokens, 0, FinishReason.ABORT))

    def answer_now(self, ids: Iterable[str]) -> None:
        """Let those of these requests that are open end their thinking; so does what goes on with them later."""
        for request_id in ids:
            if (request := self._open.get(request_id)) is not None:
                params = msgspec.structs.replace(request.prompt.params, thinking_token_budget=0)
                request.prompt = msgspec.structs.replace(request.prompt, params=params)
                self._workers[request.worker](AnswerNow([request_id]))

    async def encode(self, message: EncodeText) -> Encoded:
        """Tokenize a text or a chat without generating.

        Raises:
            InvalidRequest: the text or the chat cannot be encoded.
        """
        reply = await self._call(msgspec.structs.replace(message, id=_new_id()), self._turns.next())
        assert isinstance(reply, Encoded)
        return reply

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        reply = await self._call(DecodeTokens(_new_id(), token_ids), self._turns.next())
        assert isinstance(reply, Decoded)
        return reply.text

    async def find_parsers(self) -> ParsersFound:
        """Ask a text worker how the model writes calls and marks its thinking."""
        reply = await self._call(FindParsers(_new_id()), self._turns.next())
        assert isinstance(reply, ParsersFound)
        return reply

    def dispatch(self, message: FromWorker) -> None:
        """Hand a worker's message to its reader; ignore it if the reader has left (an abort crosses outputs)."""
        match message:
            case TextOutputs() if message.source not in self._retired:
                now = time.monotonic()
                for output in message.outputs:
                    self._deliver(output, now)
            case RequestRejected():
                self._reject(message)
            case Encoded() | Decoded() | ParsersFound():
                call = self._calls.pop(message.id, None)
                if call is not None and not call.reply.done():
                    call.reply.set_result(message)

    def note_queued(self, num_queued: int) -> None:
        """Note how many requests wait in the engines for a row, pages or budget."""
        self._admission.num_queued = num_queued

    def fail(self, error: Exception) -> None:
        """End every open request with this error, and refuse new ones with it."""
        self._failure = error
        for request in list(self._open.values()):
            request.generation.fail(error)
        self._open.clear()
        self._fail_calls(self._calls, error)

    def replace(self, worker: int, retired: str, news: Sequence[EngineNews], verdict: Verdict | None = None) -> None:
        """Send a restarted text worker all open requests and calls of its dead predecessor.

        Args:
            retired: the inbox of the dead worker; its outputs that still arrive are dropped.
            news: the state of the engines.
            verdict: on the calls that the dead worker prepared; suspects go first, and convicted calls are ended.
        """
        verdict = verdict or Verdict()
        self._convict(verdict.convicted)
        send = self._workers[worker]
        self._retired.add(retired)
        if self._ready is not None:
            send(self._ready)
        for one in news:
            send(one)
        own = {request_id: request for request_id, request in self._open.items() if request.worker == worker}
        calls = [call for call in self._calls.values() if call.worker == worker]
        for message in messages_again(own, calls, verdict):
            send(message)

    def lose(self, worker: int, error: Exception) -> None:
        """End all requests and calls of a text worker with this error; it drops them too if it ever wakes up."""
        ids = [request_id for request_id, request in self._open.items() if request.worker == worker]
        for request_id in ids:
            request = self._open[request_id]
            self._forget(request_id, FinishReason.ERROR)
            request.generation.fail(error)
        if ids:
            self._workers[worker](AbortRequests(ids))
        self._fail_calls([call_id for call_id, call in self._calls.items() if call.worker == worker], error)

    def _convict(self, ids: Sequence[str]) -> None:
        """End the calls whose first ids are these."""
        for first in ids:
            own = [request_id for request_id, one in self._open.items() if one.prompt.ids[0] == first]
            self._reject(RequestRejected(ids=own or [first], status=500, error=KILLS_WORKERS))

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _call(self, message: TextQuery, worker: int) -> TextReply:
        self._raise_failure()
        call = self._calls[message.id] = Call(worker, message, asyncio.get_running_loop().create_future())
        try:
            self._send(worker, message)
            return await call.reply
        finally:
            self._calls.pop(message.id, None)

    def _fail_calls(self, ids: Iterable[str], error: Exception) -> None:
        for call in [self._calls.pop(call_id) for call_id in list(ids)]:
            if not call.reply.done():
                call.reply.set_exception(error)

    def _send(self, worker: int, message: ToWorker) -> None:
        try:
            self._workers[worker](message)
        except (OverflowError, UnicodeEncodeError, RecursionError) as error:
            # JSON knows integers of any size and lone surrogates; msgpack does not.
            raise InvalidRequest("a number or a string in the request cannot be represented") from error

    def _deliver(self, output: TextOutput, now: float) -> None:
        request = self._open.get(output.id)
        if request is None:
            return
        if output.progress is not None:
            request.generation.deliver(output)
            return
        num_tokens = len(output.token_ids)
        if self._observer is not None and num_tokens:
            if request.num_output_tokens == 0:
                request.first_output = now
                self._observer.first_token(now - request.arrived)
            else:
                self._observer.next_tokens(num_tokens, now - request.last_output)
        if request.num_output_tokens == 0:
            self._admission.started(output.id)
        request.last_output = now
        request.num_prompt_tokens = output.num_prompt_tokens
        request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)
        request.num_output_tokens += num_tokens
        request.deltas.append(output.token_ids)
        request.change = request.change or output.change
        if output.finish_reason is not None:
            request.scheduled = output.scheduled_at
            self._forget(output.id, output.finish_reason)
        request.generation.deliver(output)

    def _reject(self, message: RequestRejected) -> None:
        error: TokenMillError = RejectedRequest(message.error, message.param, message.status, message.code)
        if message.status == Unavailable.status:
            error = Unavailable(message.error)
        for request_id in message.ids:
            request = self._open.get(request_id)
            if request is not None:
                self._forget(request_id, FinishReason.ERROR)
                # The call as a whole is refused: its reader leaves and so aborts what its other prompts started.
                request.generation.fail(error)
            if request_id in self._calls:
                self._fail_calls([request_id], error)

    def _leave(self, generation: Generation, worker: int) -> None:
        """Abort the requests that a reader left open."""
        ids = [request_id for request_id in generation.open_ids if request_id in self._open]
        if ids:
            for request_id in ids:
                self._forget(request_id, FinishReason.ABORT)
            self._workers[worker](AbortRequests(ids))

    def _forget(self, request_id: str, reason: FinishReason) -> None:
        request = self._open.pop(request_id)
        self._admission.ended(request_id, reason in (FinishReason.STOP, FinishReason.LENGTH))
        if self._observer is not None:
            self._observer.finished(request.finished(reason, is_first=request_id == request.prompt.ids[0]))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _new_id() -> str:
    return secrets.token_hex(12)
