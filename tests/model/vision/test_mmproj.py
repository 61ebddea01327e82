"""Vision models in two GGUF files: the tower's numbers and the answers are those of the checkpoint they are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model.vision.test_llm import GREEDY, chat, picture, tokens
from tests.model.weights.mmproj_writer import write_decoder, write_mmproj
from tests.vision_checkpoints import make_qwen25_checkpoint, make_vision_checkpoint
from tokenmill import LLM
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.vision.tower import load_tower
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.hub import fetch

MAKERS = {"qwen3_vl": make_vision_checkpoint, "qwen2_5_vl": make_qwen25_checkpoint}
Made = tuple[Path, Path]


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint, and a folder with its decoder as a file, where the sizes of images stand beside."""
    folder = MAKERS[request.param](tmp_path_factory.mktemp("checkpoint"))
    if request.param == "qwen2_5_vl":
        # Such a file does not say how large windows are: they are those of all published models.
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["window_size"] = 112
        (folder / "config.json").write_text(json.dumps(config))
    files = tmp_path_factory.mktemp("files")
    write_decoder(folder, files / "model-F32.gguf")
    (files / "preprocessor_config.json").write_bytes((folder / "preprocessor_config.json").read_bytes())
    return folder, files


def encoded(folder: Path, pixels: np.ndarray) -> torch.Tensor:
    spec = read_vision(folder)
    assert spec is not None
    return load_tower(folder, spec, TorchKernels("float32", "cpu")).encode(torch.from_numpy(pixels))


@pytest.fixture
def beside(made: Made, tmp_path: Path) -> Callable[..., Path]:
    """Write a tower beside a copy of the decoder, and return what `fetch` makes of both."""

    def beside(kind: str = "F32", swaps_ffn: bool = False) -> Path:
        for file in made[1].iterdir():
            (tmp_path / file.name).symlink_to(file)
        write_mmproj(made[0], tmp_path / "mmproj-F32.gguf", kind, swaps_ffn)
        return fetch(str(tmp_path / "model-F32.gguf"), None, str(tmp_path / "cache"))

    return beside


@pytest.mark.parametrize("swaps_ffn", [False, True], ids=["", "older names"])
def test_a_tower_is_that_of_the_checkpoint(
    made: Made, beside: Callable[..., Path], swaps_ffn: bool, rng: np.random.Generator
) -> None:
    unpacked = beside(swaps_ffn=swaps_ffn)
    spec = read_vision(made[0])
    assert spec is not None
    assert read_vision(unpacked) is not None
    pixels = rng.integers(0, 256, (1, spec.factor * 3, spec.factor * 6, 3), dtype=np.uint8)
    assert torch.equal(encoded(unpacked, pixels), encoded(made[0], pixels))


def test_a_tower_in_halves_is_near(made: Made, beside: Callable[..., Path], rng: np.random.Generator) -> None:
    spec = read_vision(made[0])
    assert spec is not None
    pixels = rng.integers(0, 256, (1, spec.factor * 2, spec.factor * 2, 3), dtype=np.uint8)
    want = encoded(made[0], pixels)
    found = encoded(beside(kind="F16"), pixels)
    assert (found - want).norm() < 0.01 * want.norm()
    assert not torch.equal(found, want)


def test_answers_are_those_of_the_checkpoint(made: Made, beside: Callable[..., Path], rng: np.random.Generator) -> None:
    options = {"dtype": "float32", "page_size": 4}
    messages = chat(picture(rng, 70, 120), "and this?", picture(rng, 40, 90))
    (want,), (found,) = [LLM(str(folder), **options).chat(messages, GREEDY) for folder in (made[0], beside())]
    assert found.prompt_token_ids == want.prompt_token_ids
    assert tokens(found) == tokens(want)


def test_without_a_tower_a_model_takes_text(made: Made, tmp_path: Path) -> None:
    folder = fetch(str(made[1] / "model-F32.gguf"), None, str(tmp_path / "cache"))
    assert read_vision(folder) is None
    assert not read_architecture(folder).takes_images
    (answer,) = LLM(str(folder), dtype="float32").generate(["the mill"], GREEDY)
    assert answer.outputs[0].token_ids


def test_a_tower_of_another_model_is_refused(made: Made, tmp_path: Path) -> None:
    kind = json.loads((made[0] / "config.json").read_text())["model_type"]
    other = next(maker for name, maker in MAKERS.items() if name != kind)(tmp_path / "other")
    write_decoder(made[0], tmp_path / "model.gguf")
    write_mmproj(other, tmp_path / "mmproj-model.gguf")
    with pytest.raises(InvalidCheckpoint, match=r"has the vision tower of another model than model\.gguf"):
        fetch(str(tmp_path / "model.gguf"), None, str(tmp_path / "cache"))
