"""Sources of one's own, by entry point or by module, and what nobody has."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from tests.engine.transfer.fake_source import FakeSource
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.transfer.protocol import SOURCE_PLUGINS
from tokenmill.startup.assembly import kv_sources


def test_a_source_is_found_by_module_and_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "tests.engine.transfer.fake_source:FakeSource"
    assert kv_sources.find_source(where) is FakeSource
    entry = EntryPoint("fake", where, SOURCE_PLUGINS)

    def entry_points(group: str, name: str) -> list[EntryPoint]:
        return [entry] if (group, name) == (SOURCE_PLUGINS, "fake") else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert kv_sources.find_source("fake") is FakeSource


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nobody", "must be an entry point"),
        ("no.such.module:Source", "cannot be imported"),
        ("tests.engine.transfer.fake_source:Nothing", "cannot be imported"),
        ("tests.engine.transfer.fake_source:PATIENCE", "must be an entry point"),
    ],
)
def test_what_is_no_source_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=f"--kv-source.*{name}.*|--kv-source {why}") as error:
        kv_sources.find_source(name)
    assert why in str(error.value)


@pytest.mark.parametrize("flags", [{"kv_disk": "/tmp/x"}, {"kv_source": ("a",)}, {"kv_host_size": 1}])
def test_without_a_prefix_cache_there_is_no_kv_from_elsewhere(flags: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="needs the prefix cache"):
        EngineConfig(model="m", enable_prefix_caching=False, **flags).resolve()  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_holds_nothing_is_refused(size: int) -> None:
    with pytest.raises(InvalidConfig, match="kv-disk-size"):
        EngineConfig(model="m", kv_disk="/tmp/x", kv_disk_size=size).resolve()
