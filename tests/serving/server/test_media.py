"""Images by address: from hosts that are allowed, on the public internet, in time; everything else is a refusal."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tokenmill.config.vision import MediaLimits
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.server import media
from tokenmill.serving.server.media import MediaFetcher, is_public_address

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]
HOST = "images.example.org"


def prompt(*urls: str) -> GenerateText:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [*parts, {"type": "text", "text": "y"}]},
    ]
    return GenerateText(ids=["a"], params=SamplingParams(), messages=messages)


def urls_of(message: GenerateText) -> list[str]:
    assert message.messages is not None
    return [part["image_url"]["url"] for part in message.messages[1]["content"] if part["type"] == "image_url"]


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[int]:
    """A host on the loopback; gives its port."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def reply(body: bytes, status: str = "200 OK", *headers: str) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""])
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    return handle


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not writer.is_closing():
        writer.write(bytes(1 << 20))
        await writer.drain()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def fetch(handler: Handler, *more: str, path: str = "/a.png?b=1", limit: int = 4) -> list[str]:
    """Return the outcome for an image of that host, and for further ones."""

    async def run() -> list[str]:
        async with answering(handler) as port:
            fetcher = MediaFetcher([f"{HOST}:{port}"], MediaLimits(limit), loopback, lambda address: True)
            (done,) = await fetcher.fetched([prompt(f"http://{HOST}:{port}{path}", *more)])
            return urls_of(done)

    return asyncio.run(run())


async def loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def test_what_comes_takes_the_place_of_its_address() -> None:
    url, other = fetch(reply(b"an image"), "data:image/png;base64,AAAA")
    assert base64.b64decode(url.partition("base64,")[2]) == b"an image"
    assert other == "data:image/png;base64,AAAA"


def test_frames_are_fetched_too() -> None:
    async def run() -> list[str]:
        async with answering(reply(b"a frame")) as port:
            fetcher = MediaFetcher([f"{HOST}:{port}"], MediaLimits(0), loopback, lambda address: True)
            parts = [{"type": "video", "video": [f"http://{HOST}:{port}/{number}" for number in range(3)], "fps": 2.0}]
            message = msgspec.structs.replace(prompt(), messages=[{"role": "user", "content": parts}])
            (done,) = await fetcher.fetched([message])
            return list(done.messages[0]["content"][0]["video"])

    assert [base64.b64decode(url.partition("base64,")[2]) for url in asyncio.run(run())] == [b"a frame"] * 3


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        (reply(b"", "302 Found", "Location: http://127.0.0.1/secret"), "answers with status 302"),
        (reply(b"", "404 Not Found"), "answers with status 404"),
        (endless, "more than 20 MiB"),
        (silent, "did not come within"),
    ],
    ids=["redirect", "missing", "endless", "silent"],
)
def test_what_is_no_image_in_time_is_refused(handler: Handler, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "SECONDS", 1.0 if handler is silent else 60.0)
    with pytest.raises(InvalidRequest, match=sentence):
        fetch(handler)


def test_more_than_a_request_may_have_are_not_fetched() -> None:
    with pytest.raises(InvalidRequest, match="5 images; at most 4"):
        fetch(reply(b"x"), *[f"http://{HOST}/{number}" for number in range(4)])


@pytest.mark.parametrize(
    "url",
    [
        f"http://{HOST}:81/a.png",
        "http://other.example.org/a.png",
        f"http://{HOST}.evil.example/a.png",
        f"http://user@{HOST}/a.png",
        f"http://evil.example#@{HOST}/a.png",
        "https:///a.png",
        f"http://{HOST}:99999/a.png",
        f"HTTP://evil.example\\@{HOST}/",
    ],
)
def test_other_hosts_are_not_asked(url: str) -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        raise AssertionError("nobody is looked up")

    with pytest.raises(InvalidRequest):
        asyncio.run(MediaFetcher([HOST], MediaLimits(4), never).fetched([prompt(url)]))


def test_a_host_that_answers_otherwise_a_moment_later_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "SECONDS", 0.5)
    answers = [["127.0.0.1"], ["8.8.8.8"]]
    asked = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers.pop()

    async def run() -> None:
        async with answering(reply(b"secret")) as port:
            fetcher = MediaFetcher([f"{HOST}:{port}"], MediaLimits(4), rebinding)
            url = f"http://{HOST}:{port}/"
            with pytest.raises(InvalidRequest, match=r"within|cannot be reached"):  # 8.8.8.8 has nothing there
                await fetcher.fetched([prompt(url)])
            assert len(asked) == 1
            with pytest.raises(InvalidRequest, match="not public"):
                await fetcher.fetched([prompt(url)])

    asyncio.run(run())


def test_without_the_flag_nothing_is_fetched() -> None:
    with pytest.raises(InvalidRequest, match="--allowed-media-domains"):
        asyncio.run(MediaFetcher((), MediaLimits(4)).fetched([prompt(f"https://{HOST}/")]))


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("fe80::1", False),
        ("::ffff:8.8.8.8", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("::127.0.0.1", False),
        ("64:ff9b:1::7f00:1", False),
        ("fec0::1", False),
        ("::ffff:0:127.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_which_addresses_are_public(address: str, is_public: bool) -> None:
    assert is_public_address(address) is is_public


# The registries of special addresses, as the first bits of each range.
SPECIAL_4 = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
    "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
]  # fmt: skip
SPECIAL_6 = [
    "::/8", "::1/128", "::/128", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48",
    "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32", "2001:2::/48", "2001:10::/28", "2001:20::/28",
    "2001:db8::/32", "2002::/16", "3fff::/20", "4000::/2", "5f00::/16", "8000::/1", "fc00::/7", "fe80::/10",
    "fec0::/10", "ff00::/8",
]  # fmt: skip
# Where forms of version 6 keep an address of version 4: what stands before and behind it, in bits.
HIDING = {
    "mapped": (80 * "0" + 16 * "1", ""),
    "compatible": (96 * "0", ""),
    "translated": (64 * "0" + 16 * "1" + 16 * "0", ""),
    "NAT64": (f"{0x64FF9B:032b}" + 64 * "0", ""),
    "local NAT64": (f"{0x64FF9B0001:048b}", 48 * "0"),
    "6to4": (f"{0x2002:016b}", 80 * "0"),
    "Teredo": (f"{0x20010000:032b}" + 64 * "1", ""),
    "ISATAP": (f"{0x2606_4700_0000_0000:064b}" + f"{0x5EFE:032b}", ""),
}


def bits_of(address: str) -> str:
    parsed = ipaddress.ip_address(address)
    return f"{int(parsed):0{parsed.max_prefixlen}b}"


def first_bits(network: str) -> str:
    address, length = network.split("/")
    return bits_of(address)[: int(length)]


def address_of(bits: str) -> str:
    kind = ipaddress.IPv4Address if len(bits) == 32 else ipaddress.IPv6Address
    return str(kind(int(bits, 2)))


def is_public_slowly(address: str) -> bool:
    bits = bits_of(address)
    special = SPECIAL_4 if len(bits) == 32 else SPECIAL_6
    return not any(bits.startswith(first_bits(network)) for network in special)


def test_no_special_address_is_public_and_none_that_hides_another() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def filled(bits: str, length: int) -> str:
        return bits + "".join(rng.choices("01", k=length - len(bits)))

    for network in SPECIAL_4 + SPECIAL_6:
        for _ in range(50):
            address = address_of(filled(first_bits(network), len(bits_of(network.split("/")[0]))))
            assert not is_public_address(address), (network, address)
    for name, (before, behind) in HIDING.items():
        for inner in (*(first_bits(network) for network in SPECIAL_4), ""):
            address = address_of(before + filled(inner, 32) + behind)
            assert not is_public_address(address), (name, address)
    public = {True: 0, False: 0}
    for _ in range(4000):
        address = address_of(filled("", 32)) if rng.random() < 0.5 else address_of(filled("001", 128))
        expected = is_public_slowly(address)
        assert is_public_address(address) is expected, address
        public[expected] += 1
    assert min(public.values()) > 100
