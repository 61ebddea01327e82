"""Send the reply to a generating call, streamed or whole, and stop as soon as the client is gone.

Exactly one outcome reaches the client: a complete reply, or an error body, or (once a stream has begun) an error
event. Leaving early, for whatever reason, aborts the call's requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.core.errors import TokenMillError
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.frontend.generation import Generation, merge
from tokenmill.serving.frontend.open_request import Caller
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.placement import placed
from tokenmill.serving.server.generation.writer import ReplyWriter, UsageCounter
from tokenmill.serving.server.http.errors import RequestTimedOut, error_response
from tokenmill.serving.server.http.middleware import SEND_BODY, is_background, owner_of, tenant_of

_logger = logging.getLogger(__name__)


class StreamFormat(msgspec.Struct, frozen=True):
    """The form of a stream.

    Attributes:
        media_type: its content type.
        remark: clients skip it; whatever stands between them and us sees that the stream lives.
    """

    media_type: bytes
    remark: bytes

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of a stream."""
        return [
            (b"content-type", self.media_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]


EVENTS = StreamFormat(b"text/event-stream; charset=utf-8", b": recovering\n\n")
JSON_LINES = StreamFormat(b"application/x-ndjson", b"")


class GenerationFailed(TokenMillError):
    """An engine could not complete a request."""


class ReplyHeaders:
    """The beginning of a reply.

    Attributes:
        is_sent: it has been sent: what goes wrong from then on comes as an event, not as a status.
    """

    def __init__(self) -> None:
        self.is_sent = False

    async def send(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        """Send it, once."""
        if not self.is_sent:
            self.is_sent = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})


class GenerationReply(Response):
    """An ASGI response that generates while it is sent.

    Attributes:
        waited: seconds of the call's timeout that have passed before.
        content_type: of a reply that is not streamed.
    """

    def __init__(
        self,
        context: ServerContext,
        call: GenerationCall,
        prompts: Sequence[GenerateText],
        writer: ReplyWriter,
        label: str,
        headers: ReplyHeaders | None = None,
        stream_format: StreamFormat = EVENTS,
    ) -> None:
        """Make a reply; operators find its requests by `label`, its id. `headers`: those of a reply that has begun."""
        super().__init__()
        self._context = context
        self._client = context.client
        self._log = context.log
        self._prompts = prompts
        self._writer = writer
        self._label = label
        self._call = call
        self._head = headers or ReplyHeaders()
        self._format = stream_format
        self._outcome = ""
        self._generation: Generation | None = None
        self._is_ended = False
        self.waited = 0.0
        self.content_type = b"application/json"
        self._usage = UsageCounter(prompts[0].params.n, prompts[0].volatile)

    def end_requests(self) -> None:
        """End the requests with finish reason `abort` and what they have so far."""
        self._is_ended = True
        if self._generation is not None:
            self._client.abort(sorted(self._generation.open_ids))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send until the reply is complete or the client disconnects."""
        began = time.monotonic()
        work = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            if self._log is not None:
                usage, seconds = self._usage.usage(), time.monotonic() - began
                outcome = "client gone" if work.cancelled() else self._outcome
                self._log.note(
                    "request",
                    f"{self._label}: {outcome}, {usage.prompt_tokens} prompt tokens, "
                    f"{usage.completion_tokens} output tokens, {seconds:.2f} s",
                    id=self._label,
                    outcome=outcome,
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    seconds=round(seconds, 4),
                )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with (
                asyncio.timeout(None if self._call.timeout is None else self._call.timeout - self.waited),
                self._client.generate(
                    placed(await self._context.media.fetched(self._prompts), self._context, scope, self._call),
                    caller_of(scope, self._label),
                ) as generation,
            ):
                self._generation = generation
                if self._is_ended:
                    self.end_requests()
                if self._call.stream:
                    await self._stream(generation, send, scope.get("state", {}).get(SEND_BODY, send))
                else:
                    await self._whole(generation, send)
            self._outcome = "done"
        except TimeoutError:
            error = RequestTimedOut(f"the request's timeout of {self._call.timeout:g} seconds has passed")
            await self._fail(error, scope, receive, send)
        except TokenMillError as error:
            await self._fail(error, scope, receive, send)
        except Exception as error:
            _logger.exception("a reply failed")
            await self._fail(error, scope, receive, send)

    async def _whole(self, generation: Generation, send: Send) -> None:
        outputs: dict[int, list[TextOutput]] = {}
        async for index, output in generation:
            outputs.setdefault(index, []).append(self._take(index, output))
        body = self._writer.document({index: merge(parts) for index, parts in outputs.items()}, self._usage)
        headers = [(b"content-type", self.content_type), (b"content-length", str(len(body)).encode())]
        await self._head.send(send, headers)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, generation: Generation, send: Send, send_body: Send) -> None:
        # The headers leave with the first delta or ping: until then a refusal can still have its proper status.
        generation.takes_remarks = True
        silence = SilenceTimer(self._context.sse_ping, generation.remark)
        try:
            async for index, output in generation:
                if output.progress is not None:
                    events = self._writer.events(index, output, self._usage)
                elif not output.token_ids and output.finish_reason is None:
                    events = self._format.remark if self._head.is_sent and not silence.is_due else b""
                else:
                    events = self._writer.events(index, self._take(index, output), self._usage)
                if not events and silence.is_due:
                    events = self._writer.ping
                if events:
                    silence.sent()
                    await self._head.send(send, self._format.headers)
                    await send_body({"type": "http.response.body", "body": events, "more_body": True})
        finally:
            silence.close()
        # Of an answer without a word, or with a call that comes whole, Ollama's writer says all at the end.
        await self._head.send(send, self._format.headers)
        await _end_stream(send, self._writer.last_events(self._usage))

    def _take(self, index: int, output: TextOutput) -> TextOutput:
        """Check and count an output; return it as the client gets it: nothing after the prompt of a scoring call."""
        check_output(output)
        if self._call.is_score:
            reason = FinishReason.LENGTH if output.finish_reason is FinishReason.STOP else output.finish_reason
            shown: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": reason, "stop_reason": None}
            output = msgspec.structs.replace(output, **shown, logprobs=None if output.logprobs is None else [])
        self._usage.add(index, output)
        return output

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        self._outcome = f"failed: {error}"
        if not self._head.is_sent:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await _end_stream(send, self._writer.failure(error))


def caller_of(scope: Scope, label: str) -> Caller:
    """Return who makes a call that its client knows by this label; `trace` is the W3C `traceparent` header."""
    trace = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), "")
    return Caller(label, trace, tenant_of(scope), owner_of(scope), is_background(scope))


def check_output(output: TextOutput) -> None:
    """Raise `GenerationFailed` if the engine could not complete the request."""
    if output.finish_reason is FinishReason.ERROR:
        raise GenerationFailed(output.error or "the engine could not complete this request")


async def _end_stream(send: Send, events: bytes) -> None:
    await send({"type": "http.response.body", "body": events, "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected; its body was read before, so no other message can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


class SilenceTimer:
    """Calls `ring` whenever nothing has been sent for some seconds; it never sends anything itself.

    Attributes:
        is_due: it has rung, and nothing has been sent since.
    """

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        """Start to count; 0 seconds: it never rings."""
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._ring = ring
        self._last = self._loop.time()
        self.is_due = False
        self._timer = self._loop.call_later(seconds, self._look) if seconds else None

    def sent(self) -> None:
        """Note that something was sent."""
        self._last = self._loop.time()
        self.is_due = False

    def close(self) -> None:
        """Stop counting."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left = self._last + self._seconds - self._loop.time()
        if left <= 0:
            self.is_due = True
            self._ring()
            left = self._seconds
        # One timer a stream, however many deltas it sends.
        self._timer = self._loop.call_later(left, self._look)
