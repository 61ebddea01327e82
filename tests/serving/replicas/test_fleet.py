"""Other weights: the path is looked at before an engine is started for it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.replicas.fleet import Fleet
from tokenmill.serving.replicas.supervisor import Supervisor


class Engines(list[Any]):
    """One engine, which serves from a folder."""

    ready = SimpleNamespace(model="/served")


class Parts:
    """A supervisor that notes the engines which it is asked to start."""

    def __init__(self) -> None:
        self.engines = Engines([SimpleNamespace(index=0)])
        self.started: list[str] = []

    async def add_engine(self, model: str, share: tuple[int, int]) -> Any:
        self.started.append(model)
        raise NotImplementedError


def replace(model: str) -> tuple[str, list[str]]:
    """Return the answer for a path, and the engines that were started."""
    parts = Parts()
    with pytest.raises((InvalidRequest, NotImplementedError)) as raised:
        asyncio.run(Fleet(cast("Supervisor", parts)).replace_weights(model))
    return str(raised.value), parts.started


@pytest.mark.parametrize(
    "name", ["nowhere", "file.bin", "empty", "weightless", "pipe.gguf", "a\0b", "x" * 5000, "loop", "~nobody/x"]
)
def test_no_engine_starts_for_what_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.bin").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").touch()
    (tmp_path / "pipe.gguf").mkdir()
    (tmp_path / "pipe.gguf" / "x.safetensors").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    said, started = replace(name if name.startswith("~") else f"{tmp_path}/{name}")
    assert "model_path" in said
    assert str(tmp_path) not in said
    assert started == []


def test_paths_of_any_form_are_refused_or_tried() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        name = "/nowhere/" + "".join(rng.choices("/.~a\0\ud800é%", k=rng.randrange(1, 12)))
        said, started = replace(name)
        assert ("model_path" in said, started) == (True, []), repr(name)


def test_a_checkpoint_and_a_name_of_the_hub_are_tried(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "one.gguf").touch()
    for name in (str(tmp_path), str(tmp_path / "one.gguf"), "owner/name"):
        assert replace(name) == ("", [name])
