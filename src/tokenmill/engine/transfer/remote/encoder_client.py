"""Ask encoder servers (`tokenmill serve MODEL --encoder-only`) for outputs, over HTTP, on threads.

    POST /v1/encoder/outputs     a `MediaInput` in JSON  ->  its packed output, see `output_files`

Contents are spread over the servers. One that fails is left alone for a while; where none answers, the engine encodes.
"""

from __future__ import annotations

import http.client
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import msgspec

from tokenmill.core.errors import InvalidConfig
from tokenmill.core.media import MediaInput

logger = logging.getLogger(__name__)

ROUTE = "/v1/encoder/outputs"
THREADS_PER_SERVER = 4
# A server that has failed is asked again after so long.
REST_SECONDS = 5.0
CONNECT_SECONDS = 3.0
# What a server reads; larger contents are encoded here. And what this side reads.
MOST_CONTENT_BYTES, MOST_OUTPUT_BYTES = 11 << 20, 1 << 30

Take = Callable[[MediaInput, bytes], bool]


class EncoderFailed(Exception):
    """A server gives no output; its text is a clause for the log."""


class EncoderClient:
    """Has contents encoded by servers. Its threads end with the process, whatever the servers do.

    Args:
        urls: `http://HOST:PORT` of each.
        api_key: that they ask for; "": none.
        take: keeps an output that has come, and returns False if it is not that of its content.
        seconds: for one content in all.
    """

    def __init__(self, urls: Sequence[str], api_key: str, take: Take, seconds: float) -> None:
        self._urls = tuple(checked_url(url) for url in urls)
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._take = take
        self._seconds = seconds
        self._turn = itertools.count()
        self._rests: dict[str, float] = {}
        self._is_closed = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS_PER_SERVER * len(self._urls), "encoder-client")

    def ask(self, one: MediaInput, answer: Callable[[bool], None]) -> None:
        """Have a content encoded; see `Encoders.ask`."""
        if len(one.content) > MOST_CONTENT_BYTES:
            answer(False)
            return
        until = time.monotonic() + self._seconds
        self._pool.submit(self._ask, one, until, answer)

    def _ask(self, one: MediaInput, until: float, answer: Callable[[bool], None]) -> None:
        is_there = False
        try:
            is_there = self._ask_each(one, until)
        finally:
            answer(is_there)

    def _ask_each(self, one: MediaInput, until: float) -> bool:
        """Ask one server after the other until one has answered well; return False if none has."""
        first, body = next(self._turn), msgspec.json.encode(one)
        for number in range(len(self._urls)):
            url = self._urls[(first + number) % len(self._urls)]
            now = time.monotonic()
            if self._is_closed.is_set() or now >= until:
                return False
            if self._rests.get(url, 0.0) > now:
                continue
            try:
                output = self._post(url, body, until)
                if self._take(one, output):
                    return True
                raise EncoderFailed("it runs another model, other kernels or another release")
            except (OSError, http.client.HTTPException, EncoderFailed) as error:
                self._rests[url] = time.monotonic() + REST_SECONDS
                logger.warning("encoder server %s gives no output: %s", url, str(error) or type(error).__name__)
        return False

    def _post(self, url: str, body: bytes, until: float) -> bytes:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(max(0.1, until - time.monotonic()))
            connection.request("POST", parts.path.rstrip("/") + ROUTE, body, self._headers)
            reply = connection.getresponse()
            data = self._read(reply, until)
            if reply.status != 200:
                raise EncoderFailed(f"it answers {reply.status}: {data[:200].decode(errors='replace')}")
            return data
        finally:
            connection.close()

    def _read(self, reply: http.client.HTTPResponse, until: float) -> bytes:
        """Read a body that may come slowly, but not for ever, and not without end."""
        data = bytearray()
        while part := reply.read1(1 << 20):
            data += part
            if len(data) > MOST_OUTPUT_BYTES or time.monotonic() > until or self._is_closed.is_set():
                raise EncoderFailed("its answer is too long or takes too long")
        if reply.length:
            raise EncoderFailed("it broke off its answer")
        return bytes(data)

    def close(self) -> None:
        """Ask nothing more; threads that wait for a server end with it or with their time."""
        self._is_closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


def checked_url(url: str) -> str:
    """Return the address of a server.

    Raises:
        InvalidConfig: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidConfig(f"--encoder-urls: a server is http://HOST:PORT or https://HOST:PORT, not {url!r}")
    return url
