"""Access a model behind an OpenAI-compatible server, over HTTP with server-sent events."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from tokenmill.core.errors import TokenMillError
from tokenmill.llm.model_protocol import Delta, Deltas, Messages, PromptProgress

CONNECT_SECONDS = 10.0
_UNIX = re.compile(r"(?:(https?)\+)?unix:(?://)?(.+)")


class ServerRefused(TokenMillError):
    """The server did not answer, or answered with an error."""


class RemoteModel:
    """A model on one server; the server is asked once for its name if no name is given."""

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, cacert: str | None = None
    ) -> None:
        """Connect to `url`, `unix:PATH`, or with TLS `https+unix:PATH`; `cacert`: certificates to trust.

        Raises:
            ServerRefused: that file cannot be read.
        """
        self._place = url
        self._model = model
        socket = _UNIX.fullmatch(url)
        address = url if socket is None else f"{socket[1] or 'http'}://localhost"
        self._url = address.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        trust = _trust(cacert)
        transport = None if socket is None else httpx.HTTPTransport(verify=trust, uds=socket[2])
        # An answer may take as long as it takes; only connecting is timed.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.Client(headers=headers, timeout=timeout, verify=trust, transport=transport)

    def chat(self, messages: Messages, fields: Mapping[str, Any]) -> Deltas:
        """Stream the assistant's next message from the server.

        Raises:
            ServerRefused: one sentence to show.
        """
        body = {"messages": messages, "return_progress": True, **fields}
        for event in self._stream("/v1/chat/completions", body):
            if "prompt_progress" in event and not event.get("choices"):
                yield Delta("", progress=_progress(event["prompt_progress"]))
            for choice in event.get("choices", []):
                yield Delta(choice.get("delta", {}).get("content") or "", choice.get("finish_reason"))

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Deltas:
        """Stream the continuation of a text from the server.

        Raises:
            ServerRefused: one sentence to show.
        """
        for event in self._stream("/v1/completions", {"prompt": prompt, **fields}):
            for choice in event.get("choices", []):
                yield Delta(choice.get("text") or "", choice.get("finish_reason"))

    def read(self, path: str) -> str:
        """Return the server's answer to a GET.

        Raises:
            ServerRefused: one sentence to show.
        """
        with self._connection_errors():
            response = self._client.get(self._url + path, timeout=CONNECT_SECONDS)
        if response.status_code != httpx.codes.OK:
            raise ServerRefused(_error_text(response))
        return response.text

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer to a POST, which may take long.

        Raises:
            ServerRefused: one sentence to show.
        """
        with self._connection_errors():
            response = self._client.post(self._url + path, json=body, timeout=None)
        if response.status_code != httpx.codes.OK:
            raise ServerRefused(_error_text(response))
        answer: dict[str, Any] = response.json()
        return answer

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
                    yield event

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ServerRefused(_why_not_connected(error, self._place)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerRefused(f"the connection to {self._place} failed: {error}") from None

    def _model_name(self) -> str:
        if self._model is None:
            self._model = str(json.loads(self.read("/v1/models"))["data"][0]["id"])
        return self._model


def events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents of a stream of server-sent events.

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


def _progress(shown: Mapping[str, Any]) -> PromptProgress:
    left = shown.get("left_ms")
    return PromptProgress(shown["processed"], shown["total"], None if left is None else left / 1000)


def _trust(cacert: str | None) -> ssl.SSLContext | bool:
    """Return which certificates to trust: the system's authorities, or only those of a file."""
    if cacert is None:
        return True
    try:
        context = ssl.create_default_context(cafile=cacert)
    except OSError as error:  # ssl.SSLError is one
        raise ServerRefused(f"--cacert {cacert}: {error.strerror or error}") from None
    # A server's own certificate will do, without the authority that signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _why_not_connected(error: BaseException, place: str) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate of {place} is not trusted ({cause.verify_message}); --cacert FILE trusts it"
        if isinstance(cause, ssl.SSLError):
            return f"{place} does not speak TLS: {cause.reason or cause}"
        cause = cause.__cause__ or cause.__context__
    return f"no server answers at {place}; start one with: tokenmill serve"


def _error_text(response: httpx.Response) -> str:
    try:
        return f"the server refuses ({response.status_code}): {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server refuses with status {response.status_code}"
