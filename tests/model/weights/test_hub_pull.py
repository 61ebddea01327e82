"""Pulling from a hub on localhost, in a process of its own (huggingface-hub reads HF_ENDPOINT once), and the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.model.weights.mmproj_writer import write_decoder, write_mmproj
from tests.model.weights.stand_in_hub import Hub, running_hub
from tests.vision_checkpoints import make_vision_checkpoint
from tokenmill.cli.main import main
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.weights.hub_cache import cached_models, remove


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "m", max_shard_size="60KB")


def pull(hub: Hub, cache: Path, model: str = "mill/tiny", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenmill", "pull", model, "--download-dir", str(cache)],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache / "home"), "NO_PROXY": "127.0.0.1", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_pull_that_is_cut_off_goes_on_at_the_byte_where_it_stopped(
    source: Path,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    weights = sorted(source.glob("*.safetensors"))
    sizes = {path.name: path.stat().st_size for path in weights}
    assert len(weights) > 1
    with running_hub({"mill/tiny": source}) as hub:
        first = weights[0]
        digest = hashlib.sha256(first.read_bytes()).hexdigest()
        blobs = tmp_path / "models--mill--tiny" / "blobs"
        blobs.mkdir(parents=True)
        have = int(rng.integers(1, sizes[first.name]))
        # As a killed process leaves it.
        (blobs / f"{digest}.tokenmill.incomplete").write_bytes(first.read_bytes()[:have])
        [unfinished] = cached_models(tmp_path)
        assert (unfinished.id, unfinished.is_unfinished, unfinished.num_bytes) == ("mill/tiny", True, have)

        hub.cut_after = int(rng.integers(5_000, 20_000))
        done = pull(hub, tmp_path)
        assert done.returncode == 0, done.stderr
        assert hub.num_bytes[first.name] >= sizes[first.name] - have
        asked = hub.starts[first.name]
        assert asked[0] == have
        assert asked == sorted(set(asked)), "every answer begins where the one before it was cut off"
        folder = Path(done.stdout.strip())
        for path in source.iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes()
        [whole] = cached_models(tmp_path)
        assert (whole.is_unfinished, whole.num_revisions) == (False, 1)
        assert whole.num_bytes == sum(path.stat().st_size for path in source.iterdir())

        hub.downloads.clear()
        assert pull(hub, tmp_path).stdout.strip() == str(folder)
        assert hub.downloads == []
    offline = pull(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout.strip() == str(folder)


def test_a_vision_tower_goes_on_at_the_byte_where_it_stopped(tmp_path: Path, rng: np.random.Generator) -> None:
    folder, repository = make_vision_checkpoint(tmp_path / "made"), tmp_path / "repository"
    repository.mkdir()
    write_decoder(folder, repository / "model-F32.gguf")
    tower = write_mmproj(folder, repository / "mmproj-F32.gguf")
    with running_hub({"mill/seeing": repository}) as hub:
        blobs = tmp_path / "cache" / "models--mill--seeing" / "blobs"
        blobs.mkdir(parents=True)
        have = int(rng.integers(1, tower.stat().st_size))
        digest = hashlib.sha256(tower.read_bytes()).hexdigest()
        (blobs / f"{digest}.tokenmill.incomplete").write_bytes(tower.read_bytes()[:have])
        done = pull(hub, tmp_path / "cache", "mill/seeing:F32")
        assert done.returncode == 0, done.stderr
        assert hub.starts[tower.name] == [have]
    assert read_vision(Path(done.stdout.strip())) is not None


def test_bytes_that_are_not_the_hubs_are_thrown_away(source: Path, tmp_path: Path) -> None:
    with running_hub({"mill/tiny": source}) as hub:
        first = min(source.glob("*.safetensors"))
        digest = hashlib.sha256(first.read_bytes()).hexdigest()
        part = tmp_path / "models--mill--tiny" / "blobs" / f"{digest}.tokenmill.incomplete"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"x" * 100)
        done = pull(hub, tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("came with other bytes than the hub says; pull it again")
    assert part.stat().st_size == 0


def test_what_the_hub_does_not_have_is_one_sentence(source: Path, tmp_path: Path) -> None:
    with running_hub({"mill/tiny": source}) as hub:
        done = pull(hub, tmp_path, "mill/nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("tokenmill: mill/nothing is neither a folder here nor a repository")


def fill(cache: Path, name: str, size: int) -> None:
    blobs = cache / f"models--{name.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_bytes(b"x" * size)
    snapshot = blobs.parent / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")


def test_models_are_listed_and_removed_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "mill/large", 3 << 20)
    fill(tmp_path, "mill/small", 1000)
    fill(tmp_path, "alone", 1)
    (tmp_path / "datasets--mill--data").mkdir()
    where = ["--download-dir", str(tmp_path)]
    assert main(["list", *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["alone", "mill/large", "mill/small"]
    assert "3.0 MiB" in lines[1]
    assert lines[3] == f"3.0 MiB in 3 models of {tmp_path}"
    assert main(["rm", "mill/large", "mill/smal", *where]) == 2
    assert "mill/smal is not in" in capsys.readouterr().err
    assert len(cached_models(tmp_path)) == 3, "nothing is deleted where a name is unknown"
    assert main(["rm", "mill/large", "alone", *where]) == 0
    assert capsys.readouterr().out == "3.0 MiB freed\n"
    assert [model.id for model in cached_models(tmp_path)] == ["mill/small"]
    assert (tmp_path / "datasets--mill--data").exists()


def test_an_empty_cache_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--download-dir", str(tmp_path / "none")]) == 0
    assert "0.0 B in 0 models" in capsys.readouterr().out
    with pytest.raises(InvalidConfig):
        remove(tmp_path / "none", ["../mill"])
