"""Fetch the images, frames and clips of sound that requests name by URL, only from hosts that the operator allows.

A name is resolved once, all its addresses must be on the public internet, and the connection goes to one of these: a
name that resolves differently a moment later does not matter. Redirects are not followed, no proxy is used, and a
reply is cut off at a limit of bytes and seconds. The content type of a reply is not trusted: the bytes are decoded
like those of a data: URL, in a process with limits.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec

from tokenmill.config.vision import MediaLimits
from tokenmill.core.data_url import data_url
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText

SECONDS = 5.0
MOST_BYTES = 20 << 20
# All that a request names is fetched at once: the frames of its videos, and their bytes with those of its images.
MOST_FRAMES, MOST_BYTES_TOGETHER = 32, 160 << 20
_PORTS = {"http": 80, "https": 443}
_AGENT = "tokenmill"
_SOUND = "audio_url"

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> its addresses, as text."""


class _Wanted(NamedTuple):
    """A URL to fetch, of sound or else of an image."""

    url: str
    is_sound: bool

    @property
    def noun(self) -> str:
        return "a clip of sound" if self.is_sound else "an image"

    @property
    def nouns(self) -> str:
        return "clips of sound" if self.is_sound else "images"

    @property
    def kinds(self) -> str:
        return "audio/*" if self.is_sound else "image/*"


class MediaFetcher:
    """Fetches media and puts it into requests as data: URLs.

    Args:
        domains: hosts that may be asked, perhaps with a port; empty: nothing is fetched.
        limits: limits on the media of a request.
        resolve, is_public: replaced by tests, which have no internet.
    """

    def __init__(
        self,
        domains: Sequence[str],
        limits: MediaLimits,
        resolve: Resolve | None = None,
        is_public: Callable[[str], bool] | None = None,
    ) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._limits = limits
        self._resolve = resolve or _addresses
        self._is_public = is_public or is_public_address

    async def fetched(self, prompts: Sequence[GenerateText]) -> list[GenerateText]:
        """Return the requests with the media at http and https URLs replaced by its data.

        Raises:
            InvalidRequest: a host is not allowed, does not answer in time, or sends no image's worth of bytes.
        """
        return [await self._fetched(prompt) for prompt in prompts]

    async def _fetched(self, prompt: GenerateText) -> GenerateText:
        wanted = [one for part in _media_parts(prompt.messages or ()) for one in _wanted(part)]
        if not wanted:
            return prompt
        if not self._domains:
            raise _refusal(f"{wanted[0].noun} must be a data: URL: nothing is fetched without --allowed-media-domains")
        self._check_count(wanted, prompt)
        try:
            async with asyncio.timeout(SECONDS):
                found = await asyncio.gather(*(self._data_url(one, len(wanted)) for one in wanted))
        except TimeoutError:
            raise _refusal(f"the images or clips did not come within {SECONDS:g} seconds") from None
        data = dict(zip((one.url for one in wanted), found, strict=True))
        return msgspec.structs.replace(prompt, messages=_replaced(prompt.messages, data))

    def _check_count(self, wanted: Sequence[_Wanted], prompt: GenerateText) -> None:
        is_video = any(part.get("type") == "video" for part in _media_parts(prompt.messages or ()))
        num_clips = sum(one.is_sound for one in wanted)
        images = len(wanted) - num_clips, self._limits.image + (MOST_FRAMES if is_video else 0)
        for what, (count, most) in {"images": images, "clips of sound": (num_clips, self._limits.audio)}.items():
            if count > most:
                raise _refusal(f"{count} {what}; at most {most} (--limit-mm-per-prompt) are fetched")

    async def _data_url(self, wanted: _Wanted, num_urls: int) -> str:
        parts = self._checked(wanted)
        host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
        try:
            addresses = await self._resolve(host, port)
        except OSError:
            raise _refusal(f"the host {host} of {wanted.noun} is not known") from None
        if not addresses or not all(map(self._is_public, addresses)):
            raise _refusal(f"the host {host} of {wanted.noun} has addresses that are not public")
        data = await _get(parts, addresses[0], port, num_urls, wanted)
        return data_url(data)

    def _checked(self, wanted: _Wanted) -> SplitResult:
        """Return the parts of a URL that may be fetched and can be read in only one way."""
        url = wanted.url
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise _refusal(f"the address of {wanted.noun} is not a URL") from None
        if not host or parts.username is not None or parts.password is not None or not url.isascii() or " " in url:
            raise _refusal(f"the address of {wanted.noun} is not a URL")
        name = host if port is None else f"{host}:{port}"
        if name not in self._domains:
            raise _refusal(f"{wanted.nouns} of {name[:100]} are not fetched: it is not among --allowed-media-domains")
        return parts


async def _get(parts: SplitResult, address: str, port: int, num_urls: int, wanted: _Wanted) -> bytes:
    """Fetch the body at a URL from one address of its host, whose certificate it checks; `num_urls`: of the request."""
    import httpx  # a tenth of a second of every start that few need

    most = min(MOST_BYTES, MOST_BYTES_TOGETHER // num_urls)
    host = f"[{address}]" if ":" in address else address
    url = f"{parts.scheme}://{host}:{port}{parts.path or '/'}" + (f"?{parts.query}" if parts.query else "")
    headers = {"Host": parts.netloc, "User-Agent": _AGENT, "Accept": wanted.kinds, "Accept-Encoding": "identity"}
    try:
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=SECONDS) as client,
            client.stream("GET", url, headers=headers, extensions={"sni_hostname": parts.hostname}) as reply,
        ):
            if reply.status_code != httpx.codes.OK:
                raise _refusal(f"the host of {wanted.noun} answers with status {reply.status_code}")
            data = bytearray()
            async for chunk in reply.aiter_raw():
                data += chunk
                if len(data) > most:
                    raise _refusal(f"{wanted.noun} of more than {most >> 20} MiB")
            return bytes(data)
    except (httpx.HTTPError, httpx.InvalidURL):
        raise _refusal(f"the host {parts.hostname} of {wanted.noun} cannot be reached") from None


def is_public_address(address: str) -> bool:
    """Return True if an address is on the public internet, whatever form it is written in.

    In IPv6 only global unicast is, without forms that stand for an IPv4 address (6to4, Teredo, ISATAP), which no host
    needs. All other such forms (mapped, compatible, translated, NAT64) lie outside of it.
    """
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed.is_global and not parsed.is_multicast and not any(parsed in network for network in _NOT_HOSTS_4)
    is_isatap = int(parsed) >> 32 & _INTERFACE in _ISATAP
    return parsed in _UNICAST and not any(parsed in network for network in _NOT_HOSTS_6) and not is_isatap


# Protocols, and relays of 6to4.
_NOT_HOSTS_4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
_UNICAST = ipaddress.IPv6Network("2000::/3")
# Protocols and tunnels, documentation, 6to4.
_NOT_HOSTS_6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
# The upper half of an interface's id in ISATAP, of a local and of a global address.
_INTERFACE, _ISATAP = 0xFFFF_FFFF, (0x0000_5EFE, 0x0200_5EFE)


async def _addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def _media_parts(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        yield from content if isinstance(content, list) else ()


def _wanted(part: dict[str, Any]) -> list[_Wanted]:
    return [_Wanted(url, part.get("type") == _SOUND) for url in _urls(part) if _is_remote(url)]


def _urls(part: dict[str, Any]) -> list[str]:
    kind = part.get("type")
    if kind == "video":
        return list(part.get("video", ()))
    return [part[kind]["url"]] if kind in ("image_url", _SOUND) else []


def _replaced(messages: list[dict[str, Any]] | None, data: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages with each URL replaced by its data."""

    def part_of(part: dict[str, Any]) -> dict[str, Any]:
        urls = [data.get(url, url) for url in _urls(part)]
        if (kind := part.get("type")) in ("image_url", _SOUND):
            return {**part, kind: {"url": urls[0]}}
        return {**part, "video": urls} if urls else part

    return [
        {**message, "content": [part_of(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages or ()
    ]


def _refusal(sentence: str) -> InvalidRequest:
    return InvalidRequest(sentence, "messages")
