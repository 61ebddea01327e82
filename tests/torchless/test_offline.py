"""`LLM` where torch cannot be imported: what it brings has the bits of what it brings where torch can be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.embedders import make_classifier, make_embedder
from tests.encoder_checkpoints import make_encoder, write_word_pieces
from tests.model.models.test_native_decoder import FAMILIES, WITH_STATES
from tests.model.weights.gguf_writer import write_gguf
from tests.tiers import tier
from tests.torchless import WISH, environment
from tokenmill.demo import demo_model_path
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512}
# Of the demo model, in processes of about the same length.
WALKS = (
    ("wishes", "grammars", "vectors", "sessions"),
    ("speculation", "adapters"),
    ("sleep", "disk", "threads"),
    ("ranks", "draft_model", "eagle_head"),
)


def walk(model: Path, scratch: Path, names: tuple[str, ...], is_blocked: bool) -> Any:
    scratch.mkdir()
    command = [sys.executable, "-m", "tests.torchless.surface", str(model), str(scratch), *names]
    done = subprocess.run(command, env=environment(is_blocked), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if is_blocked and WISH != "rehearsal":
        assert not answer["has_torch"]
    return answer["found"]


def compare(model: Path, folder: Path, names: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    without, with_torch = (walk(model, folder / str(is_blocked), names, is_blocked) for is_blocked in (True, False))
    for name in names:
        assert without[name] == with_torch[name], name


@pytest.mark.parametrize("names", WALKS, ids=" ".join)
def test_the_demo_model_offers_everything(names: tuple[str, ...], tmp_path: Path) -> None:
    compare(demo_model_path(), tmp_path, names)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_runs(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family, seed=3, **SHAPE | FAMILIES[family])
    names: tuple[str, ...] = ("wishes", "formats", "grammars", "sleep")
    if tier() == "nightly" and family not in WITH_STATES:
        names += ("vectors", "speculation", "disk", "threads", "sessions")
    compare(folder, tmp_path, names)


def test_embedders_and_classifiers_run(tmp_path: Path) -> None:
    compare(make_embedder(tmp_path / "decoder", seed=3, **SHAPE), tmp_path / "1", ("embedder",))
    encoder = make_encoder(tmp_path / "encoder", "bert", seed=3, max_position_embeddings=512)
    write_word_pieces(encoder)
    compare(encoder, tmp_path / "2", ("embedder", "float_embedder"))
    compare(make_classifier(tmp_path / "labels", 4, seed=3, **SHAPE), tmp_path / "3", ("classifier",))


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0"])
def test_a_gguf_file_runs(kind: str, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "model", "qwen3", seed=3, **SHAPE | {"head_dim": 16})
    compare(write_gguf(made, "qwen3", kind), tmp_path, ("wishes",))
