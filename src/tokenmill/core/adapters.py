"""`AdapterRef`: the identity of a LoRA adapter: its name in the API, the folder of its files, and their digest.

The digest is of the files' content. So anything kept by it, KV above all, is never mistaken for that of other files,
whatever their name or place.
"""

from __future__ import annotations

import re

import msgspec

from tokenmill.core.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """One version of an adapter.

    Attributes:
        path: the folder, as the engine finds it.
        digest: 64 hexadecimal digits, of the two files that are read.
        rank: the largest of its modules.
    """

    name: str
    path: str
    digest: str
    rank: int = 0


def digest_of(adapter: AdapterRef | None) -> str:
    """Return the digest of an adapter's files; "": no adapter."""
    return "" if adapter is None else adapter.digest


def check_adapter_name(name: str) -> str:
    """Return the name if it can be used in URLs, logs and metrics; refuse it otherwise.

    Raises:
        InvalidRequest: it cannot be used there.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"a name begins with a letter or digit and has up to 128 of these and ._:/@+-, not {name[:130]!r}",
            "lora_name",
        )
    return name
