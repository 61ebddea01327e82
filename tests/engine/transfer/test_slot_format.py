"""The files of a store: what earlier releases have written is read, and written alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tokenmill.core.request import CacheKey
from tokenmill.engine.transfer.page_keys import page_keys
from tokenmill.engine.transfer.slot_file import SlotFile
from tokenmill.engine.transfer.slot_format import VERSION, SlotFormat
from tokenmill.engine.transfer.slots import Slot

# An index of format 2 with one page of 4 tokens in slot 5, as release 0.1.0 wrote it, and the page.
HEADER = b'{"version":2,"name":"0123456789abcdef","page_bytes":200,"page_size":4,"checksum":"crc32c"}\n'
RECORD = bytes.fromhex("0500000073e50bd9508786c1ac7918ed70fdcb13eaeb47da0300000001000000040000009f000000ad98ed01")
TOKENS, PAGE, NUM_SLOTS, SLOT_BYTES = np.array([3, 1, 4, 159], dtype=np.int32), bytes(range(200)), 8, 4096


def test_a_store_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    pages, index = tmp_path / "kv-0123456789abcdef-0.pages", tmp_path / "kv-0123456789abcdef-0.index"
    pages.write_bytes(bytes(5 * SLOT_BYTES) + PAGE)
    index.write_bytes(HEADER + RECORD)
    for path in (pages, index):
        path.chmod(0o600)
    store = SlotFile(tmp_path, SlotFormat("0123456789abcdef", len(PAGE), len(TOKENS)), NUM_SLOTS * SLOT_BYTES)
    (slot,) = store.slots()
    data = memoryview(bytearray(len(PAGE)))
    assert store.read_pages([slot], data) == 1
    assert bytes(data) == PAGE
    ((key, tokens),) = page_keys(CacheKey("model", "salt"), TOKENS, len(TOKENS))
    assert slot == Slot(5, key, tokens, store.checksum(memoryview(PAGE))), "what a request looks for"
    store.close()


def test_a_store_is_written_alike() -> None:
    assert VERSION == 2, "another format has other files; keep the test above, so that these go on being read"
    form = SlotFormat("0123456789abcdef", len(PAGE), len(TOKENS))
    ((key, tokens),) = page_keys(CacheKey("model", "salt"), TOKENS, len(TOKENS))
    assert form.header == HEADER
    assert form.encode(Slot(5, key, tokens, form.checksum(memoryview(PAGE)))) == RECORD
