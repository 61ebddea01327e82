"""The native CRC-32C against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.engine.transfer.checksum import find_checksum, reference_crc32c


def test_the_reference_is_the_crc32c_that_everybody_means() -> None:
    # The check value of the catalogue of CRCs, and one of RFC 3720 (iSCSI), B.4.
    assert reference_crc32c(b"123456789") == 0xE3069283
    assert reference_crc32c(bytes(32)) == 0x8A9136AA


def test_the_native_checksum_is_the_reference_at_every_length(rng: np.random.Generator) -> None:
    name, checksum = find_checksum()
    if name != "crc32c":
        pytest.skip("the native kernels were not built")
    for length in [*range(40), 1023, 4096]:
        data = rng.integers(0, 256, length, dtype=np.uint8).tobytes()
        assert checksum(memoryview(data)) == reference_crc32c(data), length
        for start in range(1, min(9, length)):
            assert checksum(memoryview(data)[start:]) == reference_crc32c(data[start:]), "memory that is not aligned"
