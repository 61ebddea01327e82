"""The published shapes of Qwen3-VL: each tensor is where transformers has it, and a start takes what is estimated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.machine_sizes import Machine
from tests.vision_checkpoints import make_vision_checkpoint
from tokenmill.cli.main import main
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import OutOfMemory
from tokenmill.core.sizes import size_text
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.vision.tower_shapes import tower_shapes
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import measure
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.sizing.forms import forms
from tokenmill.startup.sizing.tower_size import tower_memory

SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
# Hidden size, its middle, layers, query heads; whether the head is the embedding; the tower.
SHAPES: dict[str, tuple[int, int, int, int, bool, dict[str, Any]]] = {
    "2B": (2048, 6144, 28, 16, True, SMALL_TOWER),
    "4B": (2560, 9728, 36, 32, True, SMALL_TOWER),
    "8B": (4096, 12288, 36, 32, False, LARGE_TOWER),
}


def config_of(name: str) -> dict[str, Any]:
    """The config.json as it is published."""
    hidden, middle, layers, heads, is_tied, tower = SHAPES[name]
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": middle,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": rope,
        "rope_theta": 5_000_000,
        "tie_word_embeddings": is_tied,
        "vocab_size": 151936,
    }
    vision = {
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **tower,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": is_tied,
        "video_token_id": 151656,
        "vision_config": vision,
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


@pytest.mark.parametrize("name", SHAPES)
def test_published_configs_have_the_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    with torch.device("meta"):
        theirs = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**config_of(name)))
    spec, architecture = read_vision(tmp_path), read_architecture(tmp_path)
    assert spec is not None
    assert architecture.takes_images
    tower = {key: tuple(one.shape) for key, one in theirs.model.visual.state_dict().items()}
    assert tower_shapes(spec) == tower
    in_tower = sum(map(math.prod, tower.values()))
    assert architecture.num_parameters() == sum(one.numel() for one in theirs.parameters()) - in_tower
    config = EngineConfig(model=str(tmp_path)).resolve()
    assert tower_memory(config, tmp_path, 2).weights == 2 * in_tower


def test_a_start_takes_what_is_estimated_and_is_refused_where_the_tower_has_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_vision_checkpoint(tmp_path)
    config = EngineConfig(model=str(folder), device="cpu", kernels="torch", num_pages=9, max_num_seqs=2).resolve()
    form, *_ = forms(config, CpuPlatform(), folder, read_architecture(folder), 1)
    built = build_engine(config, platform=Machine(1 << 30))
    built.engine.close()
    assert built.ready.weight_bytes == form.weight_bytes
    _, decoder = measure(read_architecture(folder), TorchKernels("bfloat16", "cpu"))
    assert decoder < form.weight_bytes / 4
    with pytest.raises(OutOfMemory, match="its weights take"):
        build_engine(config, platform=Machine(form.weight_bytes))
    room = Machine(form.weight_bytes + form.tower.reserved + (1 << 20))
    build_engine(config, platform=room).engine.close()
    assert main(["estimate", str(folder), "--device", "cpu", "--bandwidth", "1GB"]) == 0
    sentence = f"Of the weights {size_text(form.tower.weights)} are a vision tower, which only images need"
    assert sentence in capsys.readouterr().out
