"""A model behind an OpenAI-compatible server, over HTTP with server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from tokenmill.cli.model_protocol import Delta, Deltas, Messages
from tokenmill.core.errors import TokenMillError

CONNECT_SECONDS = 10.0


class ServerRefused(TokenMillError):
    """The server did not answer, or answered with an error."""


class RemoteModel:
    """Talks to one server; the model's name is asked for once if none is given."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # An answer may take as long as it takes; only connecting is timed.
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))

    def chat(self, messages: Messages, fields: Mapping[str, Any]) -> Deltas:
        """See `ModelAccess.chat`.

        Raises:
            ServerRefused: one sentence to show.
        """
        for choice in self._stream("/v1/chat/completions", {"messages": messages, **fields}):
            yield Delta(choice.get("delta", {}).get("content") or "", choice.get("finish_reason"))

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Deltas:
        """See `ModelAccess.complete`.

        Raises:
            ServerRefused: one sentence to show.
        """
        for choice in self._stream("/v1/completions", {"prompt": prompt, **fields}):
            yield Delta(choice.get("text") or "", choice.get("finish_reason"))

    def read(self, path: str) -> str:
        """What the server answers to a GET.

        Raises:
            ServerRefused: one sentence to show.
        """
        with self._connection_errors():
            response = self._client.get(self._url + path, timeout=CONNECT_SECONDS)
        if response.status_code != httpx.codes.OK:
            raise ServerRefused(_error_text(response))
        return response.text

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._connection_errors():
            body = {"model": self._model_name(), **body, "stream": True}
            with self._client.stream("POST", self._url + path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ServerRefused(_error_text(response))
                for event in events(response.iter_bytes()):
                    if "error" in event:
                        raise ServerRefused(f"the server ended the answer: {event['error'].get('message')}")
                    yield from event.get("choices", [])

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise ServerRefused(f"no server answers at {self._url}; start one with: tokenmill serve") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerRefused(f"the connection to {self._url} failed: {error}") from None

    def _model_name(self) -> str:
        if self._model is None:
            self._model = str(json.loads(self.read("/v1/models"))["data"][0]["id"])
        return self._model


def events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON documents of a stream of server-sent events.

    Lines end with LF only: a text may contain other characters that Python counts as line ends, such as U+2028.

    Raises:
        ServerRefused: the stream ends without `[DONE]`.
    """
    waiting = b""
    for chunk in chunks:
        *lines, waiting = (waiting + chunk).split(b"\n")
        for line in lines:
            name, _, data = line.partition(b":")
            if name != b"data":
                continue
            if data.strip() == b"[DONE]":
                return
            yield json.loads(data)
    raise ServerRefused("the server ended the answer before it was complete")


def _error_text(response: httpx.Response) -> str:
    try:
        return f"the server refuses ({response.status_code}): {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server refuses with status {response.status_code}"
