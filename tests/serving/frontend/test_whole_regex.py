"""Expressions of whole texts find what the ones that they are made of find in a text."""

from __future__ import annotations

import datetime
import ipaddress
import re
import uuid

import pytest

from tokenmill.serving.frontend.whole_regex import FORMATS, whole

TEXTS = ["", "a", "ab", "xaby", "b", "cb", "a|b", "^a", "$", "ab$", "c\nab", "[a]", "]", "ab\n"]


@pytest.mark.parametrize(
    "pattern", ["a", "^a", "b$", "^ab$", "^a|b$", "^(a|c)b?$", "a|^c", "[$^|]", r"\$$", r"^[]|]$", ""]
)
def test_a_text_matches_where_its_pattern_is_found(pattern: str) -> None:
    form = whole(pattern)
    assert form is not None
    for text in TEXTS[:-1] if pattern.endswith("$") else TEXTS:  # it is also before a last line break in Python
        assert bool(re.fullmatch(form, text)) is bool(re.search(pattern, text)), (pattern, text)


@pytest.mark.parametrize("pattern", ["(^a)", "a$b", r"a\b", "(a|b$)"])
def test_anchors_elsewhere_cannot_be_said(pattern: str) -> None:
    assert whole(pattern) is None


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2026-02-28", "2026-02-30"),
        ("time", "23:59:59.5Z", "24:00:00Z"),
        ("date-time", "2026-11-26T10:00:00+01:00", "2026-11-26"),
        ("duration", "P3D", "3D"),
        ("ipv4", "10.0.255.1", "10.0.256.1"),
        ("ipv6", "fe80::1", "fe80::1::2"),
        ("uuid", "01234567-89ab-cdef-0123-456789abcdef", "01234567"),
        ("hostname", "a-b.example", "-a"),
        ("email", "a.b@example.org", "a@b"),
        ("uri", "https://example.org/?q=1", "example"),
    ],
)
def test_formats(name: str, good: str, bad: str) -> None:
    assert re.fullmatch(FORMATS[name], good)
    assert not re.fullmatch(FORMATS[name], bad)
    readers = {
        "date": datetime.date.fromisoformat,
        "ipv4": ipaddress.IPv4Address,
        "ipv6": ipaddress.IPv6Address,
        "uuid": uuid.UUID,
    }
    if name in readers:
        readers[name](good)


def test_short_addresses_are_addresses() -> None:
    for left in range(7):
        for right in range(7):
            text = ":".join(["1"] * left) + "::" + ":".join(["a"] * right)
            if re.fullmatch(FORMATS["ipv6"], text):
                ipaddress.IPv6Address(text)
