"""Good and bad checkpoint folders: what is loaded, and the one sentence that says what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tokenmill.config.model_files import eos_token_ids
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.layer import Layer
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.mlp import MLP
from tokenmill.model.weights.checkpoint import open_checkpoint, read_architecture
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.loader import load_model
from tokenmill.model.weights.safetensors_header import read_header

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, read_architecture(folder), TorchKernels("float32", "cpu"), **options)


def parameters(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the place of each tensor of a checkpoint, written out by hand."""
    found = {"model.embed_tokens.weight": decoder.embedding.weight, "model.norm.weight": decoder.final_norm.weight}
    if not decoder.architecture.tie_embeddings:
        found["lm_head.weight"] = decoder.head.weight
    for number, layer in enumerate(decoder.layers):
        found |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer_parameters(layer)}
    return found


def layer_parameters(layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    yield "input_layernorm.weight", layer.attention_norm.weight
    yield "post_attention_layernorm.weight", layer.mlp_norm.weight
    yield from linear_parameters("self_attn.", layer.attention.qkv)
    yield from linear_parameters("self_attn.", layer.attention.output)
    if layer.attention.layer.norms is not None:
        yield "self_attn.q_norm.weight", layer.attention.layer.norms.q
        yield "self_attn.k_norm.weight", layer.attention.layer.norms.k
    if isinstance(layer.mlp, MLP):
        yield from linear_parameters("mlp.", layer.mlp.gate_up)
        yield from linear_parameters("mlp.", layer.mlp.down)
        return
    yield "mlp.gate.weight", layer.mlp.router.weight.weight
    for expert, (gate_up, down) in enumerate(zip(layer.mlp.experts.gate_up, layer.mlp.experts.down, strict=True)):
        gate, up = gate_up.weight.chunk(2)
        yield f"mlp.experts.{expert}.gate_proj.weight", gate
        yield f"mlp.experts.{expert}.up_proj.weight", up
        yield f"mlp.experts.{expert}.down_proj.weight", down.weight


def linear_parameters(prefix: str, linear: Linear) -> Iterator[tuple[str, torch.Tensor]]:
    sizes = [part.count for part in linear.parts.values()]
    names = ["o_proj" if part == "output" else f"{part}_proj" for part in linear.parts]
    for name, weight in zip(names, linear.weight.weight.split(sizes), strict=True):
        yield f"{prefix}{name}.weight", weight
    for name, bias in zip(names, linear.bias.split(sizes) if linear.bias is not None else (), strict=False):
        yield f"{prefix}{name}.bias", bias


def refusal(folder: Path) -> str:
    """Return the error of loading the folder; one sentence on one line."""
    with pytest.raises(InvalidCheckpoint) as raised:
        load(folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def rewrite(folder: Path, change: Any) -> None:
    """Apply `change` to the dict of tensors in model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "qwen3", tokenizer=False)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    made = make_checkpoint(tmp_path / "sharded", "qwen3", tokenizer=False, max_shard_size="20KB")
    assert len(list(made.glob("*.safetensors"))) > 3
    return made


# The names and parts of other families are in tests of their own, which compare logits.
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "smollm3", "granite"])
def test_every_tensor_arrives_in_its_place(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    stored, loaded = load_file(folder / "model.safetensors"), parameters(load(folder))
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name


def test_shards_load_like_a_single_file(folder: Path, sharded: Path) -> None:
    whole, parts = parameters(load(folder)), parameters(load(sharded))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_weights_are_cast_to_the_asked_type(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    decoder = load_model(folder, read_architecture(folder), TorchKernels("float16", "cpu"))
    for name, tensor in parameters(decoder).items():
        assert torch.equal(tensor, stored[name].to(torch.float16))


def test_tied_embeddings_share_memory_and_a_stored_head_is_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(331, 32)}))
    decoder = load(folder)
    assert decoder.head is decoder.embedding
    assert decoder.head.weight.count_nonzero() > 0


@pytest.mark.parametrize("change", ["another", "a row", "another type", "a copy", "not tied"])
def test_a_head_that_is_left_out_is_named_once(change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False, tie_word_embeddings=change != "not tied")
    before = load(folder).embedding.weight
    heads = {"another": torch.randn_like(before), "another type": before.bfloat16(), "a row": before.clone()}
    heads["a row"][-1, -1] += 1
    if change != "not tied":
        head = heads.get(change, before.clone())
        rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    caplog.clear()
    load(folder)
    messages = [record.getMessage() for record in caplog.records]
    if change in heads:
        (message,) = messages
        assert "tensor lm_head.weight is left out: tie_word_embeddings" in message
        assert "the output head is model.embed_tokens.weight" in message
    else:
        assert not messages


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [331, [2, 400], 10**6])
def test_an_end_that_the_model_cannot_say_is_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": value}))
    worst = value[-1] if isinstance(value, list) else value
    with pytest.raises(
        InvalidCheckpoint, match=rf"{name}: eos_token_id {worst} is not in the vocabulary of 331 tokens"
    ):
        read_architecture(folder)


def test_the_last_token_of_the_vocabulary_may_end_a_text(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", eos_token_id=330)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 330]}))
    assert read_architecture(folder).eos_token_ids == (330,)
    assert eos_token_ids(folder) == {0, 330}


def test_progress_counts_bytes_up_to_all_of_them(sharded: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(sharded, progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.num_bytes for tensor in open_checkpoint(sharded).tensors.values())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_rotary_tables_of_old_checkpoints_are_ignored(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(Q_PROJ))
    assert refusal(folder) == f"{folder}/model.safetensors has no tensor {Q_PROJ}, which config.json calls for"


def test_a_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 33)}))
    assert refusal(folder) == (
        f"{folder}/model.safetensors: tensor {Q_PROJ} has shape [64, 33], config.json calls for [64, 32]"
    )


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")]
)
def test_a_wrong_dtype_is_named(dtype: torch.dtype, name: str, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32).to(dtype)}))
    assert refusal(folder) == (
        f"{folder}/model.safetensors: tensor {Q_PROJ} has dtype {name}; supported: F32, F16, BF16"
    )


def test_a_surplus_tensor_is_refused_not_ignored(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert "tensor model.layers.0.self_attn.q_proj.bias has no place in the architecture" in refusal(folder)


def test_a_file_cut_anywhere_is_refused(folder: Path, rng: np.random.Generator) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for size in [0, 7, 8, 9, len(content) - 1, *rng.integers(0, len(content), 20).tolist()]:
        path.write_bytes(content[:size])
        message = refusal(folder)
        assert message.startswith(f"{path} is "), size
        assert "truncated" in message or "not a safetensors file" in message, size


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_pointer_of_git_lfs_is_named(name: str, folder: Path) -> None:
    path = folder / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n")
    with pytest.raises(InvalidCheckpoint, match=f"{name} is a Git LFS pointer.*: run `git lfs pull`"):
        read_header(path) if name.endswith("safetensors") else open_gguf(path)


def test_a_truncated_file_names_the_tensor_that_is_cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert re.fullmatch(
        re.escape(str(path)) + r" is truncated: tensor model\.\S+ ends at byte \d+ of the data, the file has \d+",
        refusal(folder),
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [64, 32], "data_offsets": [0, 12]}, "cannot lie at bytes 0 to 12"),
        ({"dtype": "F32", "shape": [-64, -32], "data_offsets": [0, 8192]}, "cannot lie"),
        ({"dtype": "F32", "shape": [64, 32], "data_offsets": [-8192, 0]}, "cannot lie"),
        ({"dtype": "F32", "shape": "all", "data_offsets": [0, 8192]}, "is malformed"),
        ([1, 2], "is malformed"),
    ],
)
def test_a_header_that_lies_is_refused(entry: Any, message: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length]) | {Q_PROJ: entry}
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])
    assert Q_PROJ in refusal(folder)
    assert message in refusal(folder)


def test_random_bytes_are_no_checkpoint(folder: Path, rng: np.random.Generator) -> None:
    for size in (8, 100, 10_000):
        (folder / "model.safetensors").write_bytes(rng.bytes(size))
        assert refusal(folder).startswith(f"{folder}/model.safetensors is ")


def test_a_missing_shard_is_named_with_a_tensor_of_it(sharded: Path) -> None:
    shard = json.loads((sharded / INDEX).read_text())["weight_map"][Q_PROJ]
    (sharded / shard).unlink()
    assert re.fullmatch(
        rf"{re.escape(str(sharded / shard))} is missing; {re.escape(INDEX)} places tensor model\.\S+ in it",
        refusal(sharded),
    )


def edit_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def test_an_index_that_misplaces_a_tensor_is_refused(sharded: Path) -> None:
    shards = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(shard for shard in shards.values() if shard != shards[Q_PROJ])
    edit_index(sharded, **{Q_PROJ: other})
    assert refusal(sharded) == f"{sharded / other} has no tensor {Q_PROJ}, which {INDEX} places there"


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "weights.bin", ""])
def test_an_index_cannot_point_outside_its_folder(shard: str, sharded: Path) -> None:
    edit_index(sharded, **{Q_PROJ: shard})
    assert refusal(sharded) == (
        f"{sharded / INDEX}: tensor {Q_PROJ} is placed in {shard!r}, which is no safetensors file name"
    )


def test_an_index_without_a_weight_map_is_refused(sharded: Path) -> None:
    (sharded / INDEX).write_text("{}")
    assert "weight_map must map tensor names to file names" in refusal(sharded)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"{folder}/model.safetensors is missing, and there is no {INDEX} either"


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(folder)
    assert "only safetensors are read" in refusal(folder)


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == f"{folder}/config.json is missing: {folder} is not a checkpoint folder"


@pytest.mark.parametrize("content", ["{", "[]", "", "\xff", "[" * 100_000])
def test_a_broken_config_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content, encoding="latin-1")
    assert refusal(folder).startswith(f"{folder}/config.json is not a JSON object")


def test_an_unknown_architecture_names_the_config_file(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["FooForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert refusal(folder).startswith(f"{folder}/config.json: architecture FooForCausalLM is not supported")


def test_dummy_weights_need_no_weight_file_and_are_the_same_each_time(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, attention_bias=True)
    (folder / "model.safetensors").unlink()
    first, second = parameters(load(folder, load_format="dummy")), parameters(load(folder, load_format="dummy"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.isfinite().all() and tensor.abs().max() < 10 for tensor in first.values())
    assert not torch.equal(
        first["model.layers.0.mlp.experts.0.up_proj.weight"], first["model.layers.0.mlp.experts.1.up_proj.weight"]
    )
