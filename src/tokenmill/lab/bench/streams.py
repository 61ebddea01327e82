"""Time one answer as its client sees it: the arrival of each piece of a stream, its tokens, and any error.

A completion is asked for token ids, so that a token whose text is held back is still counted when it is sent. Vectors
and scores arrive in one piece.
"""

from __future__ import annotations

import enum
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from tokenmill.lab.bench.workload import Prompt

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
# Of a query, whose documents are the drawn texts.
_QUERY_WORDS = 8


class Backend(enum.Enum):
    """The kind of request, by vLLM's names."""

    COMPLETIONS = "openai"
    EMBEDDINGS = "openai-embeddings"
    RERANK = "vllm-rerank"


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int | None = None


class _Pooled(msgspec.Struct):
    """An answer with vectors or with scores."""

    data: list[msgspec.Raw] = []
    results: list[msgspec.Raw] = []
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


@dataclass(slots=True)
class Stream:
    """A request and its measured answer. Times in seconds on the monotonic clock.

    Attributes:
        arrivals: arrival time of each piece with tokens.
        num_tokens: number of tokens, as counted by the server if it reports that.
        num_prompt_tokens: as counted by the server; None: it does not say.
        error: its kind in a word or two, the same for all errors of a kind; None: a complete answer.
        detail: the message of the server or the connection.
    """

    prompt: Prompt
    sent: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    error: str | None = None
    detail: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds for each token after the first; None: there was only one."""
        later = self.num_tokens - 1
        return (self.arrivals[-1] - self.arrivals[0]) / later if later > 0 else None

    def fail(self, error: str, detail: str) -> None:
        """Note an error."""
        self.error, self.detail = error, detail


async def run_stream(client: httpx.AsyncClient, model: str, prompt: Prompt, fields: dict[str, Any]) -> Stream:
    """Send one request and read its answer to the end; errors are noted in the result, not raised."""
    path, asked = _question(prompt)
    body = {
        "model": model,
        **asked,
        "max_tokens": prompt.output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **fields,
    }
    stream = Stream(prompt, time.monotonic())
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                detail = (await response.aread()).decode(errors="replace")
                stream.fail(f"status {response.status_code}", detail[:500])
                return stream
            await _read(response, stream)
    except httpx.ConnectError as error:
        stream.fail("no connection", str(error))
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        stream.fail("broken stream", f"{type(error).__name__}: {error}")
    return stream


async def run_pooled(client: httpx.AsyncClient, model: str, texts: Sequence[Prompt], backend: Backend) -> Stream:
    """Send one request for the vectors or the scores of texts; errors are noted in the result, not raised.

    Vectors are asked of token ids; documents, which have to be texts, have a word for each.
    """
    path, body = "/v1/embeddings", {"model": model, "input": [text.token_ids for text in texts]}
    if backend is Backend.RERANK:
        documents = [_words(text.token_ids) for text in texts]
        path, body = "/v1/rerank", {"model": model, "query": _words(texts[0].token_ids[:_QUERY_WORDS])}
        body["documents"] = documents
    stream = Stream(Prompt([token for text in texts for token in text.token_ids], 0), time.monotonic())
    try:
        response = await client.post(path, json=body)
        if response.status_code != httpx.codes.OK:
            stream.fail(f"status {response.status_code}", response.text[:500])
            return stream
        answer = msgspec.json.decode(response.content, type=_Pooled)
    except httpx.ConnectError as error:
        stream.fail("no connection", str(error))
        return stream
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        stream.fail("broken answer", f"{type(error).__name__}: {error}")
        return stream
    stream.arrivals.append(time.monotonic())
    stream.num_prompt_tokens = None if answer.usage is None else answer.usage.prompt_tokens
    if (count := len(answer.data) + len(answer.results)) != len(texts):
        stream.fail("short answer", f"{count} of {len(texts)} texts")
    return stream


def _words(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def _question(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a prompt's request: its tokens as they are, or as words beside images."""
    if not prompt.images:
        return PATH, {"prompt": prompt.token_ids}
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in prompt.images]
    parts.append({"type": "text", "text": _words(prompt.token_ids)})
    return CHAT_PATH, {"messages": [{"role": "user", "content": parts}]}


async def _read(response: httpx.Response, stream: Stream) -> None:
    counted = 0
    usage: _Usage | None = None
    async for data in _events(response):
        if data == b"[DONE]":
            break
        event = msgspec.json.decode(data, type=_Event)
        if bytes(event.error) not in (b"", b"null"):
            stream.fail("error event", bytes(event.error).decode(errors="replace"))
            return
        usage = event.usage or usage
        # Servers that do not know `return_token_ids` send a piece for each token.
        brought = sum(1 if choice.token_ids is None else len(choice.token_ids) for choice in event.choices)
        if brought:
            stream.arrivals.append(time.monotonic())
            counted += brought
    else:
        stream.fail("broken stream", "it ended without [DONE]")
        return
    stream.num_tokens = counted if usage is None else usage.completion_tokens
    if not stream.arrivals or stream.num_tokens < stream.prompt.output_len:
        stream.fail("short answer", f"{stream.num_tokens} of {stream.prompt.output_len} tokens")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    waiting = b""
    async for chunk in response.aiter_bytes():
        *lines, waiting = (waiting + chunk).split(b"\n")
        for line in lines:
            name, _, data = line.partition(b":")
            if name == b"data":
                yield data.strip()
