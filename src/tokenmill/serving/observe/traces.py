"""Export spans of finished requests to an OpenTelemetry collector: OTLP over HTTP as JSON, with vLLM's attributes.

A request that brings a `traceparent` (W3C) is a child of that span. Spans are sent in batches beside the server's work;
those that the collector does not take are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.core.api_messages import FinishedRequest
from tokenmill.core.request import FinishReason
from tokenmill.core.version import VERSION

if TYPE_CHECKING:
    import httpx

_logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
MAX_WAITING = 4096
_MAX_BATCH = 512
_SPAN_KIND_SERVER = 2
_STATUS_ERROR = 2
_TRACE_PARENT = re.compile(
    r"00-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<parent>(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
)
_SAMPLED = 1


class TraceExporter:
    """Collects spans and posts them to `endpoint`, the collector's full URL, e.g. http://127.0.0.1:4318/v1/traces."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        self._endpoint = endpoint
        self._model_name = model_name
        self._waiting: deque[FinishedRequest] = deque(maxlen=MAX_WAITING)
        self._is_away = False

    def add(self, request: FinishedRequest) -> None:
        """Add the span of a finished request, unless its client does not sample the trace."""
        parent = _TRACE_PARENT.fullmatch(request.trace)
        if parent is None or int(parent["flags"], 16) & _SAMPLED:
            self._waiting.append(request)

    async def run(self) -> None:
        """Send spans until cancelled."""
        import httpx  # a tenth of a second of every start that few need

        async with httpx.AsyncClient(timeout=5.0) as client:
            while True:
                await asyncio.sleep(FLUSH_SECONDS)
                await self._flush(client)

    async def _flush(self, client: httpx.AsyncClient) -> None:
        import httpx

        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_MAX_BATCH, len(self._waiting)))]
            try:
                headers = {"Content-Type": "application/json"}
                reply = await client.post(self._endpoint, content=self._payload(batch), headers=headers)
                reply.raise_for_status()
                self._is_away = False
            except httpx.HTTPError as error:
                if not self._is_away:
                    _logger.warning("the trace collector does not take spans: %s", type(error).__name__)
                self._is_away = True
                return

    def _payload(self, batch: list[FinishedRequest]) -> bytes:
        # The monotonic clock of the requests, as Unix time.
        offset = time.time() - time.monotonic()
        spans = [_span(request, offset, self._model_name) for request in batch]
        scope = {"scope": {"name": "tokenmill", "version": VERSION}, "spans": spans}
        resource = {"attributes": _attributes({"service.name": "tokenmill"})}
        return msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})


def _span(request: FinishedRequest, offset: float, model_name: str) -> dict[str, Any]:
    values: dict[str, str | int | float] = {
        "gen_ai.request.id": request.label,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reason": request.reason.value,
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.cached_tokens": request.num_cached_tokens,
        "gen_ai.usage.completion_tokens": request.num_output_tokens,
        "gen_ai.latency.e2e": request.ended - request.arrived,
    }
    if request.first_output:
        values["gen_ai.latency.time_to_first_token"] = request.first_output - request.arrived
    if request.scheduled:
        values["gen_ai.latency.time_in_queue"] = request.scheduled - request.arrived
    if request.scheduled and request.first_output:
        values["gen_ai.latency.time_in_model_prefill"] = request.first_output - request.scheduled
        values["gen_ai.latency.time_in_model_decode"] = request.last_output - request.first_output
        values["gen_ai.latency.time_in_model_inference"] = request.last_output - request.scheduled
    parent = _TRACE_PARENT.fullmatch(request.trace)
    return {
        "traceId": secrets.token_hex(16) if parent is None else parent["trace"],
        **({} if parent is None else {"parentSpanId": parent["parent"]}),
        "spanId": secrets.token_hex(8),
        "name": "llm_request",
        "kind": _SPAN_KIND_SERVER,
        "startTimeUnixNano": _nanoseconds(request.arrived + offset),
        "endTimeUnixNano": _nanoseconds(request.ended + offset),
        "attributes": _attributes(values),
        "status": {"code": _STATUS_ERROR} if request.reason is FinishReason.ERROR else {},
    }


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: str | int | float) -> dict[str, Any]:
    """Return an attribute's value in OTLP's JSON, which has 64-bit integers as strings."""
    match value:
        case str():
            return {"stringValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}


def _nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))
