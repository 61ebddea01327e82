"""The tiers that come with TokenMill: a disk that outlives the engine, and the host's memory for the pages of a GPU."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from tokenmill.core.errors import InvalidConfig
from tokenmill.core.version import VERSION
from tokenmill.engine.transfer.protocol import SourceContext
from tokenmill.engine.transfer.slot_file import SlotFile
from tokenmill.engine.transfer.slots import SlotMemory
from tokenmill.engine.transfer.tier import Tier


def disk_tier(context: SourceContext, folder: Path, limit: int) -> Tier:
    """Make a tier that keeps pages in files of a folder.

    Args:
        limit: bytes that pages may take.

    Raises:
        InvalidConfig: the folder cannot be used, or `limit` holds no page.
    """
    whose = f"{VERSION}/{context.fingerprint}/{context.mover.layout}/{context.page_size}"
    name = f"{blake2b(whose.encode(), digest_size=8).hexdigest()}-{context.engine}"
    try:
        store = SlotFile(folder, name, context.mover.page_bytes, context.page_size, limit)
    except OSError as error:
        raise InvalidConfig(f"--kv-disk {folder}: {error.strerror or error}") from error
    return Tier("disk", store, context.page_size)


def host_tier(context: SourceContext, limit: int) -> Tier:
    """Make a tier that keeps pages in the host's memory.

    Raises:
        InvalidConfig: `limit` holds no page.
    """
    if limit < context.mover.page_bytes:
        raise InvalidConfig(f"--kv-host-size: {limit} bytes hold no page of {context.mover.page_bytes}")
    return Tier("host", SlotMemory(context.mover.page_bytes, limit), context.page_size)
