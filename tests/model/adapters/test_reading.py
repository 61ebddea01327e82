"""Adapters are read whole or refused by name: every field, every tensor, and files that mean harm."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.model.adapters.trained import change_config, change_tensors, make_adapter
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.adapters.places import Place, places_of
from tokenmill.model.adapters.reading import ReadAdapter, read_adapter
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.weights.checkpoint import read_architecture

PREFIX = "base_model.model.model.layers.0.self_attn"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", tokenizer=False)


@pytest.fixture(scope="module")
def places(base: Path) -> list[Place]:
    return places_of(Decoder(read_architecture(base), TorchKernels("float32", "meta")))


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    make_adapter(base, folder, 1)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "adapter"))


def read(folder: Path, places: list[Place]) -> ReadAdapter:
    return read_adapter(folder, places, 16)


def refusal(folder: Path, places: list[Place]) -> str:
    with pytest.raises(InvalidCheckpoint) as refused:
        read(folder, places)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_the_digest_is_of_both_files(folder: Path, places: list[Place]) -> None:
    first = read(folder, places).digest
    assert read(folder, places).digest == first and len(first) == 64
    change_tensors(folder, lambda tensors: tensors[f"{PREFIX}.q_proj.lora_A.weight"].add_(0.001))
    second = read(folder, places).digest
    change_config(folder, lora_alpha=9)
    assert len({first, second, read(folder, places).digest}) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("alora_invocation_tokens", [1, 2]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("megatron_config", {"a": 1}),
        ("use_bdlora", {"a": 1}),
        ("a_field_of_next_year", 1),
        ("ensure_weight_tying", True),
    ],
)
def test_a_field_that_is_not_implemented_is_refused_by_name(
    field: str, value: Any, folder: Path, places: list[Place]
) -> None:
    change_config(folder, **{field: value})
    assert f"{field} is set, which is not supported" in refusal(folder, places)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"r": 0}, "a rank must be at least 1"),
        ({"r": 17}, "--max-lora-rank is 16"),
        ({"r": "4"}, "no adapter's config"),
        ({"rank_pattern": {"q_proj": -1}}, "a rank must be at least 1"),
        ({"rank_pattern": {"q_proj": 3}}, "the model needs (3, 32)"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"target_modules": "(" * 3000}, "no regular expression"),
        ({"target_modules": ["nothing"]}, "belongs to a module that the config does not name"),
        ({"target_modules": ["q_proj"]}, "belongs to a module that the config does not name"),
        ({"layers_to_transform": [1]}, "belongs to a module that the config does not name"),
        ({"layers_pattern": "(a+)+", "layers_to_transform": [0]}, "layers_pattern '(a+)+'"),
        ({"exclude_modules": ["k_proj"]}, "belongs to a module that the config does not name"),
        ({"lora_alpha": 1e300}, "the scale of model.layers.0.self_attn.q_proj is not a float32 number"),
        ({"alpha_pattern": {"q_proj": -1e300}}, "the scale of model.layers.0.self_attn.q_proj"),
    ],
)
def test_a_value_that_cannot_be_is_refused(
    fields: dict[str, Any], words: str, folder: Path, places: list[Place]
) -> None:
    change_config(folder, **fields)
    assert words in refusal(folder, places)


def _move(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_put(f"{PREFIX}.q_proj.lora_magnitude_vector", torch.ones(4)), "the magnitudes of DoRA"),
        (_put(f"{PREFIX}.q_proj.lora_B.bias", torch.ones(4)), "a bias"),
        (
            _put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4)),
            "a module that the config does not name",
        ),
        (_put("base_model.model.lm_head.weight", torch.ones(4)), "lm_head.weight belongs to a module that takes no"),
        (
            _put("base_model.model.lm_head.lora_A.weight", torch.ones(4)),
            "belongs to a module that the config does not name",
        ),
        (_put("something", torch.ones(4)), "tensor something belongs to a module that takes no"),
        (lambda tensors: tensors.pop(f"{PREFIX}.v_proj.lora_B.weight"), "no lora_B of model.layers.0.self_attn.v_proj"),
        (_move(f"{PREFIX}.v_proj.lora_A.weight", "model.v"), "no lora_A of model.layers.0.self_attn.v_proj"),
        (_put(f"{PREFIX}.q_proj.lora_A.weight", torch.ones(4, 31)), "has the shape (4, 31)"),
        (_put(f"{PREFIX}.q_proj.lora_A.weight", torch.ones(4, 32).to(torch.int8)), "is of I8"),
        (_put(f"{PREFIX}.q_proj.lora_A.weight", torch.full((4, 32), float("nan"))), "has NaN or infinite values"),
        (_put(f"{PREFIX[17:]}.q_proj.lora_A.weight", torch.ones(4, 32)), "two tensors whose names differ"),
    ],
)
def test_a_tensor_that_has_no_place_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None], words: str, folder: Path, places: list[Place]
) -> None:
    change_tensors(folder, change)
    assert words in refusal(folder, places)


@pytest.mark.parametrize(
    ("file", "data", "words"),
    [
        ("adapter_config.json", None, "No such file"),
        ("adapter_config.json", b"[1]", "no adapter's config"),
        ("adapter_config.json", b"[" * 100_000, "no adapter's config"),
        ("adapter_config.json", b" " * (2 << 20), "more than 1048576 bytes"),
        ("adapter_model.safetensors", None, "No such file"),
        ("adapter_model.safetensors", b"", "not a safetensors file"),
        ("adapter_model.safetensors", b"\xff" * 64, "not a safetensors file"),
        ("adapter_model.safetensors", (2).to_bytes(8, "little") + b"{}", "no lora_A"),
        ("adapter_model.safetensors", bytes(40 << 20), "which an adapter of --max-lora-rank cannot have"),
    ],
)
def test_broken_and_huge_files_end_in_a_sentence(
    file: str, data: bytes | None, words: str, folder: Path, places: list[Place]
) -> None:
    (folder / file).unlink()
    if data is not None:
        (folder / file).write_bytes(data)
    assert words in refusal(folder, places)


def test_truncated_weights_are_refused_wherever_they_end(folder: Path, places: list[Place], rng: Any) -> None:
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    for end in rng.integers(0, len(data), 20).tolist():
        path.write_bytes(data[:end])
        message = refusal(folder, places)
        assert "is truncated" in message or "not a safetensors file" in message, end


def test_a_pickle_is_never_looked_at(folder: Path, places: list[Place]) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "adapter_model.safetensors" in refusal(folder, places)


def test_an_expression_that_never_ends_is_given_up(folder: Path, places: list[Place]) -> None:
    change_config(folder, target_modules=r"(model|[a-z.]|[a-z0-9._])*\.(([a-z_]+)+)+!")
    assert "regular expressions could not be tried" in refusal(folder, places)
