"""Qwen2.5-VL: windows, RMSNorm and SwiGLU in the tower, axes one behind the other: transformers' tower and tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.model.vision.test_llm import GREEDY, NUM_TOKENS, chat, picture, tokens
from tests.vision_checkpoints import load_vision_oracle, make_qwen25_checkpoint
from tokenmill import LLM
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.vision.tower import load_tower


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen25_checkpoint(tmp_path_factory.mktemp("qwen2.5-vl"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> transformers.PreTrainedModel:
    return load_vision_oracle(checkpoint)


@torch.no_grad()
@pytest.mark.parametrize("grid", [(2, 2), (4, 4), (4, 10), (10, 2), (6, 14)])
def test_the_tower_is_that_of_transformers(
    checkpoint: Path, oracle: transformers.PreTrainedModel, grid: tuple[int, int], rng: np.random.Generator
) -> None:
    rows, columns = grid
    pixels = rng.integers(0, 256, (1, 14 * rows, 14 * columns, 3), dtype=np.uint8)
    spec = read_vision(checkpoint)
    assert spec is not None
    assert (spec.window, spec.full_blocks) == (2, (1, 3))
    tower = load_tower(checkpoint, spec, TorchKernels("float32", "cpu"))
    found = tower.encode(torch.from_numpy(pixels))
    expected = oracle.model.visual(
        tower._patches(torch.from_numpy(pixels)), grid_thw=torch.tensor([[1, rows, columns]])
    )
    torch.testing.assert_close(found[:, 0], expected.pooler_output, rtol=1e-5, atol=1e-5)
    assert found.shape[1] == 1


def processed(images: list[Image.Image]) -> dict[str, torch.Tensor]:
    size = {"shortest_edge": 28 * 28, "longest_edge": 140 * 140}
    processor = Qwen2VLImageProcessorPil(patch_size=14, size=size)
    return dict(processor(images=images, return_tensors="pt"))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 4, "encoder_budget": 25, "page_size": 4}],
    ids=["whole", "in chunks"],
)
def test_answers_are_those_of_transformers(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator, options: dict[str, Any]
) -> None:
    first, second = picture(rng, 70, 120), picture(rng, 140, 90)
    shown = [[first], [first, second], [second]]
    with LLM(checkpoint, dtype="float32", num_pages=200, **options) as llm:
        outputs = llm.chat([chat(*images, "hello") for images in shown], GREEDY)
    for output, images in zip(outputs, shown, strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        answer = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **processed(images),
            mm_token_type_ids=(ids == oracle.config.image_token_id).int(),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tokens(output) == answer[0, ids.shape[1] :].tolist()


def test_older_files_have_the_text_models_config_in_the_file_itself(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    fields = json.loads((checkpoint / "config.json").read_text())
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    rope_scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **fields, "rope_theta": rope["rope_theta"], "rope_scaling": rope_scaling}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert read_vision(tmp_path) == read_vision(checkpoint)
    prompts = [[5, 3, 8, 200, 7]]
    told = []
    for folder in (checkpoint, tmp_path):
        with LLM(folder, dtype="float32", num_pages=50) as llm:
            told.append([tokens(one) for one in llm.generate(prompts, GREEDY)])
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_act", "gelu"), ("window_size", 10), ("fullatt_block_indexes", [4]), ("num_heads", 5)]
)
def test_other_values_are_refused_by_name(checkpoint: Path, tmp_path: Path, field: str, value: object) -> None:
    fields = json.loads((checkpoint / "config.json").read_text())
    fields["vision_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidCheckpoint, match=field):
        read_vision(tmp_path)
