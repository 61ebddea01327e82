"""`AdapterRef`: a LoRA adapter as everybody calls it: its name in the API, where its files are, and what is in them.

The digest is of the files' content. Whatever is kept by it, KV above all, can never be taken for that of other files,
whatever name or place these have.
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
    """What is in an adapter's files; "" for none."""
    return "" if adapter is None else adapter.digest


def check_adapter_name(name: str) -> str:
    """The name, if it can stand in URLs, logs and metrics.

    Raises:
        InvalidRequest: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"a name begins with a letter or digit and has up to 128 of these and ._:/@+-, not {name[:130]!r}",
            "lora_name",
        )
    return name
