"""Fetching from a hub on localhost, in a process of its own: huggingface-hub reads HF_ENDPOINT once, at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.model.weights.gguf_writer import write_gguf
from tests.model.weights.mmproj_writer import write_decoder, write_mmproj
from tests.model.weights.stand_in_hub import Hub, running_hub
from tests.vision_checkpoints import make_vision_checkpoint
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.weights.hub import fetch

FETCH = """
import json, sys, threading
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.hub import fetch
calls, threads = [], set()

def progress(done, total):
    calls.append((done, total))
    threads.add(threading.current_thread().name)

try:
    folder, error = fetch(*json.loads(sys.argv[1]), progress), None
except InvalidCheckpoint as refused:
    folder, error = None, str(refused)
print(json.dumps({"folder": folder and str(folder), "error": error, "calls": calls, "threads": sorted(threads)}))
"""


@dataclass
class Outcome:
    folder: Path | None
    error: str | None
    calls: list[tuple[int, int]]
    threads: list[str]
    stderr: str


def fetch_in_a_process(endpoint: str, cache: Path, model: str, revision: str | None = None, **env: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-c", FETCH, json.dumps([model, revision, str(cache)])],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache / "home"), "NO_PROXY": "127.0.0.1", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    calls = [(count, total) for count, total in outcome["calls"]]
    return Outcome(
        outcome["folder"] and Path(outcome["folder"]), outcome["error"], calls, outcome["threads"], done.stderr
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("source"), "qwen3", max_shard_size="40KB")
    for unwanted in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "original/model.safetensors"):
        (folder / unwanted).parent.mkdir(exist_ok=True)
        (folder / unwanted).write_bytes(b"not asked for")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_a_snapshot_has_what_serving_needs_and_reports_its_bytes(source: Path, tmp_path: Path) -> None:
    with running_hub({"mill/tiny": source}) as hub:
        got = fetch_in_a_process(hub.url, tmp_path, "mill/tiny")
        assert got.error is None
        assert got.folder is not None
        names = {path.name for path in got.folder.iterdir()}
        unwanted = {"pytorch_model.bin", "consolidated.safetensors", "README.md", "original"}
        assert names == {path.name for path in source.iterdir()} - unwanted
        for name in names:
            assert (got.folder / name).read_bytes() == (source / name).read_bytes()

        size = sum((source / name).stat().st_size for name in names)
        assert got.calls[-1] == (size, size)
        assert all(0 <= done <= total <= size for done, total in got.calls)
        assert got.threads == ["MainThread"], "what progress does, such as sending, may belong to one thread"
        # The caller draws the progress; huggingface-hub's own bars stay away.
        assert "%|" not in got.stderr

        hub.downloads.clear()
        again = fetch_in_a_process(hub.url, tmp_path, "mill/tiny", "main")
        assert again.folder == got.folder
        assert hub.downloads == []
    offline = fetch_in_a_process(hub.url, tmp_path, "mill/tiny", HF_HUB_OFFLINE="1")
    assert offline.folder == got.folder


def one_sentence(outcome: Outcome) -> str:
    assert outcome.folder is None
    assert outcome.error is not None
    assert "\n" not in outcome.error
    return outcome.error


@pytest.fixture
def hub(source: Path) -> Hub:
    with running_hub({"mill/tiny": source, "mill/gated": None}) as hub:
        yield hub


def test_an_unknown_repository_is_neither_folder_nor_repository(hub: Hub, tmp_path: Path) -> None:
    error = one_sentence(fetch_in_a_process(hub.url, tmp_path, "mill/nothing"))
    assert error.startswith("mill/nothing is neither a folder here nor a repository on the hub")


def test_a_name_near_one_of_the_catalogue_is_asked_after(hub: Hub, tmp_path: Path) -> None:
    error = one_sentence(fetch_in_a_process(hub.url, tmp_path, "smolm2"))
    assert error.endswith("; did you mean smollm2?")


def test_a_gated_repository_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    error = one_sentence(fetch_in_a_process(hub.url, tmp_path, "mill/gated"))
    assert "mill/gated is gated: accept its terms" in error
    assert "HF_TOKEN" in error


def test_an_unknown_revision_is_named(hub: Hub, tmp_path: Path) -> None:
    error = one_sentence(fetch_in_a_process(hub.url, tmp_path, "mill/tiny", "v9"))
    assert error == "the hub's mill/tiny has no revision v9"


@pytest.mark.parametrize("env", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["no hub there", "offline"])
def test_without_a_connection_the_error_says_so(env: dict[str, str], tmp_path: Path) -> None:
    error = one_sentence(fetch_in_a_process("http://127.0.0.1:9", tmp_path, "mill/tiny", **env))
    assert error.startswith("cannot reach the hub for mill/tiny, and there is no complete copy in the cache")


def test_an_existing_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    assert fetch(str(tmp_path), None, None) == tmp_path


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c", "what is this"])
def test_what_can_only_be_a_path_never_reaches_the_hub(model: str) -> None:
    with pytest.raises(InvalidCheckpoint, match="there is no folder"):
        fetch(model, None, None)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(InvalidCheckpoint, match="is a file; a checkpoint is a folder"):
        fetch(str(tmp_path / "model.bin"), None, None)


def test_a_tag_fetches_its_file_with_all_parts_and_nothing_else(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "made", "qwen3")
    repository = tmp_path / "repository"
    repository.mkdir()
    write_gguf(folder, "qwen3").rename(repository / "model-Q8_0.gguf")
    for name in ("model-Q4_K_M.gguf", "mmproj-F16.gguf", "README.md"):
        (repository / name).write_bytes(b"another")
    with running_hub({"owner/model": repository}) as hub:
        found = fetch_in_a_process(hub.url, tmp_path / "cache", "owner/model:q8_0")
        assert found.error is None
        missing = fetch_in_a_process(hub.url, tmp_path / "cache", "owner/model:Q2_K")
    assert found.folder is not None
    assert (found.folder / "config.json").exists()
    assert {Path(name).name for name in hub.downloads} == {"model-Q8_0.gguf"}
    assert missing.error == (
        "the hub's owner/model has no GGUF file for 'Q2_K'; it has: model-Q4_K_M.gguf, model-Q8_0.gguf"
    )
    # Without a connection the copy in the cache will do.
    again = fetch_in_a_process("http://127.0.0.1:9", tmp_path / "cache", "owner/model:Q8_0")
    assert again.folder == found.folder


def test_a_vision_model_comes_with_the_tower_that_is_nearest_in_bits(tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path / "made")
    repository = tmp_path / "repository"
    (repository / "F32").mkdir(parents=True)
    write_decoder(folder, repository / "F32" / "model-F32.gguf")
    for kind in ("F16", "F32"):
        write_mmproj(folder, repository / f"mmproj-{kind}.gguf", kind)
    with running_hub({"owner/model": repository}) as hub:
        found = fetch_in_a_process(hub.url, tmp_path / "cache", "owner/model:F32")
    assert found.error is None
    assert found.folder is not None
    assert {Path(name).name for name in hub.downloads} == {"model-F32.gguf", "mmproj-F32.gguf"}
    assert read_vision(found.folder) is not None
    again = fetch_in_a_process("http://127.0.0.1:9", tmp_path / "cache", "owner/model:F32")
    assert again.folder == found.folder
