"""Pages of an accelerator: the same bytes as on the host, by pinned memory, and only who copies waits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.transfer.test_page_mover import SPEC, make_cache, pages_of
from tokenmill.engine.transfer.device_pages import DevicePages
from tokenmill.engine.transfer.page_mover import RawPages
from tokenmill.model.attention.protocol import KVCache
from tokenmill.model.attention.tensor_kv import HeadMajorKV, TokenMajorKV


@pytest.mark.parametrize(
    ("kind", "dtype"), [(TokenMajorKV, "bfloat16"), (HeadMajorKV, "float32"), (HeadMajorKV, "int8")]
)
def test_pages_travel_between_a_device_and_the_host_unchanged(
    rng: np.random.Generator, kind: type[KVCache], dtype: str
) -> None:
    platform, source, target = FakePlatform(), make_cache(kind, dtype), make_cache(kind, dtype)
    device, host = DevicePages(platform, source.pieces, "layout"), RawPages(target.pieces, "layout")
    assert (device.layout, device.page_bytes) == (host.layout, host.page_bytes)
    assert platform.pinned_sizes == [kind.bytes_per_page(SPEC, 16, dtype)]
    data, others = memoryview(bytearray(device.page_bytes)), {page: pages_of(source, page) for page in (0, 1, 3, 4)}
    device.read(2, data)
    host.write(3, data)
    assert pages_of(target, 3) == pages_of(source, 2)
    host.read(4, data)
    device.write(2, data)
    assert pages_of(source, 2) == pages_of(target, 4)
    assert {page: pages_of(source, page) for page in others} == others
    assert platform.host_waits == platform.events, "for the end of each copy, and for nothing else"
    assert len(platform.events) == 2
    assert platform.entered == []
