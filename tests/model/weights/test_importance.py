"""The size of the inputs of matrices, measured layer by layer, against the hooks of a plain model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.checkpoints import load_oracle, make_checkpoint
from tests.paging import make_attention
from tokenmill.model.attention.backends.reference import ReferenceAttention
from tokenmill.model.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.model.attention.tensor_kv import HeadMajorKV
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.stored_tensors import floats
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.error_costs import ErrorCosts
from tokenmill.model.quantization.packed import QUANTIZATIONS, WeightedRows, pick_columns, pick_rows
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.importance import MOST_TOKENS, SEQUENCE, TEXT, InputImportance, MakeAttention
from tokenmill.model.weights.loader import plan_model

native = load_kernels(1)
pytestmark = pytest.mark.skipif(native is None, reason="the native kernels are not built here")
PAGE = 16
# Of the oracle: module by role.
MODULES = {"q": "self_attn.q_proj", "output": "self_attn.o_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


def in_torch(spec: AttentionSpec, num_pages: int) -> AttentionBackend:
    return ReferenceAttention(spec, HeadMajorKV(spec, num_pages, PAGE, "bfloat16", "cpu"))


def in_one_call(spec: AttentionSpec, num_pages: int) -> AttentionBackend:
    return make_attention("native", spec, num_pages, PAGE, torch.bfloat16, native=native)


def importance_of(
    folder: Path, seen: list[tuple[int, int]] | None = None, attention: MakeAttention = in_torch
) -> InputImportance:
    def progress(done: int, total: int) -> None:
        if seen is not None:
            seen.append((done, total))

    kernels = NativeKernels(native, QUANTIZATIONS["int4"])
    shape = folder, folder / "tokenizer.json", read_architecture(folder), kernels, "auto", PAGE
    return InputImportance(*shape, attention, progress)


def mean_squares(folder: Path) -> dict[WeightKey, torch.Tensor]:
    """Of the oracle's inputs in float32, over the same sequences."""
    oracle, sums = load_oracle(folder), dict[WeightKey, torch.Tensor]()
    for layer, block in enumerate(oracle.model.layers):
        for role, name in MODULES.items():

            def note(module, inputs, output, key=WeightKey(role, layer, None, "weight")) -> None:  # noqa: B008
                squares = inputs[0].double().square().flatten(0, -2).sum(0)
                sums[key] = sums.get(key, 0) + squares

            block.get_submodule(name).register_forward_hook(note)
    text = TEXT.read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:MOST_TOKENS]
    with torch.no_grad():
        for start in range(0, len(ids), SEQUENCE):
            oracle(torch.tensor([ids[start : start + SEQUENCE]]))
    return {key: squares / squares.mean() for key, squares in sums.items()}


@pytest.mark.parametrize("attention", [in_torch, in_one_call])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_inputs_are_those_of_a_model_in_floats(tmp_path, family, attention):
    folder, seen = make_checkpoint(tmp_path, family, head_dim=16), list[tuple[int, int]]()
    found, wanted = importance_of(folder, seen, attention).measure(), mean_squares(tmp_path)
    assert wanted.keys() <= found.keys()
    for key, squares in wanted.items():
        torch.testing.assert_close(
            torch.from_numpy(found[key].importance).double(),
            squares.clamp(min=1e-3),
            rtol=0.25,
            atol=0.02,
            msg=str(key),
        )
    count = read_architecture(folder).layers
    assert seen[0] == (0, len(count)) and seen[-1] == (len(count), len(count))


@pytest.mark.parametrize("family", ["qwen3", "arcee", "olmo2", "gpt_oss", "qwen3_moe"])
def test_one_call_notes_the_inputs_of_the_same_matrices(tmp_path, family):
    folder = make_checkpoint(tmp_path, family, head_dim=16)
    in_parts, whole = (importance_of(folder, attention=attention).measure() for attention in (in_torch, in_one_call))
    assert whole.keys() == in_parts.keys() and len(whole) > 8
    for key, values in whole.items():
        distance = np.abs(values.importance - in_parts[key].importance).mean()
        assert distance < 0.2, f"{key}: {distance}"  # another attention rounds otherwise


def test_measuring_does_not_name_again_what_is_left_over(tmp_path, caplog):
    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.randn(331, 32)}, folder / "model.safetensors")
    kernels = NativeKernels(native, QUANTIZATIONS["int4"])
    plan_model(folder, read_architecture(folder), kernels)
    importance_of(folder).measure()
    assert [record.getMessage().count("lm_head.weight is left out") for record in caplog.records] == [1]


def test_experts_that_meet_few_tokens_are_left_out(tmp_path):
    found = importance_of(make_checkpoint(tmp_path, "qwen3_moe")).measure()
    experts = {key for key in found if key.expert is not None}
    assert experts
    assert all(key.role.startswith("expert") for key in experts)


def test_a_plan_hands_the_importance_to_its_matrices(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    kernels = NativeKernels(native, QUANTIZATIONS["int4"])
    plan = plan_model(folder, read_architecture(folder), kernels)
    weighed = msgspec.structs.replace(plan, importance=importance_of(folder))
    packed = [
        {target.key: target.matrix for target in made.load().targets() if isinstance(target.matrix, PackedWeight)}
        for made in (plan, weighed)
    ]
    found, importance = {}, importance_of(folder).measure()
    key = WeightKey("output", 0, None, "weight")
    reads = {read.key: read for read in plan.reads}
    weight = floats(reads[key].rows()).float()
    for name, matrices in zip(("plain", "weighed"), packed, strict=True):
        rows = matrices[key].lookup(torch.arange(len(weight))).float()
        found[name] = float((torch.from_numpy(importance[key].importance) * (rows - weight) ** 2).sum())
    assert found["weighed"] < found["plain"]


def test_parts_of_weighted_rows_keep_their_importance():
    rows = WeightedRows(StoredArray(torch.randn(4, 6).numpy(), "F32"), ErrorCosts(torch.rand(6).numpy()))
    picked = pick_rows(rows, [2, 0])
    assert isinstance(picked, WeightedRows) and np.array_equal(picked.values.values, rows.values.values[[2, 0]])
    assert picked.costs is rows.costs
    assert np.array_equal(pick_columns(rows, [1, 3]).values, rows.values.values[:, [1, 3]])


def test_the_digest_follows_the_tokenizer(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    before = importance_of(folder).digest
    assert before == importance_of(folder).digest
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b" ")
    assert importance_of(folder).digest != before
