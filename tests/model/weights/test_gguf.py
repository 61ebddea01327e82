"""GGUF files: block types against the gguf package, whole files against transformers with the same rounded weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, quants

from tests.checkpoints import load_oracle, make_checkpoint, nudged
from tests.full_disk import contents, room_for
from tests.model.models.test_phi3 import LONG_ROPE, PARTS
from tests.model.weights.gguf_writer import write_gguf
from tests.paging import PagedRequests, make_attention
from tokenmill.config.model_files import default_sampling
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.stored_tensors import floats
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.blocks import LAYOUTS
from tokenmill.model.quantization.packed import (
    QUANTIZATIONS,
    UNQUANTIZED,
    BlockRows,
    Mxfp4Rows,
    PackedFormat,
    PackedFormats,
    QuantizedRows,
)
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.folder import LINK_NAME
from tokenmill.model.weights.gguf.reads import GgufRead
from tokenmill.model.weights.gguf.values import packed_formats, read_rows
from tokenmill.model.weights.hub import fetch
from tokenmill.model.weights.loader import choose_formats, load_model

native = load_kernels(1)


def rounded(weight: torch.Tensor, kind: str | None) -> torch.Tensor:
    if kind is None or weight.dim() == 1 or 1 in weight.shape:  # a vector, or the filters of a convolution
        return weight
    block = GGMLQuantizationType[kind]
    return torch.from_numpy(quants.dequantize(quants.quantize(weight.detach().numpy(), block), block))


def logits(folder: Path, sequence: list[int], rng: np.random.Generator) -> torch.Tensor:
    decoder = load_model(folder, read_architecture(folder), TorchKernels("float32", "cpu"))
    requests = PagedRequests([sequence], 16, rng)
    attention = make_attention("cpu", decoder.attention_spec, requests.num_pages, 16, torch.float32)
    (got,) = requests.run(decoder, attention, [[(0, len(sequence))]])
    return got


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@pytest.mark.parametrize("kind", [*LAYOUTS])
def test_blocks_mean_what_the_gguf_package_says(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    block = GGMLQuantizationType[kind]
    shape = quants.quant_shape_to_byte_shape((int(rng.integers(1, 6)), 512), block)
    stored = rng.integers(0, 256, shape, dtype=np.uint8)
    # Scales are halves somewhere in a block: exponents that are all ones would be NaN or infinite.
    stored &= 0xBF
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("some", stored, raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rows = read_rows(open_gguf(tmp_path / "x.gguf").tensors["some"])
    assert isinstance(rows, QuantizedRows | BlockRows)
    want = torch.from_numpy(quants.dequantize(stored, block))
    torch.testing.assert_close(floats(rows), want, rtol=1e-5, atol=1e-5)
    # The columns of a rank: the same bits, of no more blocks than hold them.
    tensor, (start, stop) = open_gguf(tmp_path / "x.gguf").tensors["some"], sorted(rng.choice(513, 2, replace=False))
    columns = Part(int(start), int(stop - start), 512)
    span = columns.widened(tensor.block)
    own = Part(columns.start - span.start, columns.count, span.count)
    cut = GgufRead(WeightKey("down", 0), tensor.columns(span), columns=own)
    assert cut.num_bytes == tensor.num_bytes * span.count // 512
    assert torch.equal(floats(cut.rows()), floats(rows)[:, start:stop])


@pytest.mark.skipif(native is None, reason="the native kernels are not built here")
@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("Q8_0", "INT8"),
        ("Q5_0", "INT5"),
        ("Q4_0", "INT4"),
        ("Q4_1", "INT4_OFFSET"),
        ("Q5_1", "INT5_OFFSET"),
        ("IQ4_NL", "INT8"),
        ("TQ2_0", "INT8"),
    ],
)
def test_integers_of_blocks_are_kept_as_they_are(kind: str, format: str, rng: np.random.Generator) -> None:
    block = GGMLQuantizationType[kind]
    shape = quants.quant_shape_to_byte_shape((40, 512), block)
    unit_bytes, decode = LAYOUTS[kind]
    units = rng.integers(0, 256, shape, dtype=np.uint8).reshape(-1, unit_bytes) & 0xBF
    bits, values, scales, offsets = decode(units)
    offsets = None if offsets is None else offsets.reshape(40, -1)
    rows = QuantizedRows(bits, values.reshape(40, 512), scales.reshape(40, -1), offsets)
    matrix = PackedWeight(native, (40, 512), format=PackedFormat[format])
    matrix.load_rows(0, rows)
    assert torch.equal(matrix.lookup(torch.arange(40)), floats(rows).bfloat16())


@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_0", "BF16", "F16"])
@pytest.mark.parametrize(
    "family",
    [
        *(
            "llama",
            "qwen3",
            "qwen2",
            "smollm3",
            "granite",
            "gemma3",
            "gemma4_moe",
            "phi3",
            "gpt_oss",
            "lfm2",
            "qwen3_5",
            "qwen3_5_moe",
        ),
        *("olmo2", "arcee", "lfm2_moe", "granite_hybrid"),
    ],
)
def test_a_file_gives_the_logits_of_its_rounded_weights(
    family: str, kind: str | None, tmp_path: Path, cache: str, rng: np.random.Generator
) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": kind == "Q4_0"}
    if family == "gpt_oss" and kind is not None:
        pytest.skip("the oracle has inputs before outputs, and biases in matrices, where rounding is another")
    if family == "gemma3":  # what no key says: one full layer in six, and a scale that is that of the heads
        shape |= {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 16}
    if family in ("lfm2_moe", "gemma4_moe"):
        shape |= {"moe_intermediate_size": 32}
    if family == "gemma4_moe":  # full layers with other KV heads, whose values are keys or not
        shape |= {"attention_k_eq_v": bool(rng.random() < 0.7)}
    if family == "granite_hybrid":
        shape |= {"intermediate_size": 32, "shared_intermediate_size": 64, "mamba_n_heads": 8}
    if family in ("lfm2", "lfm2_moe"):  # files without a head are tied
        shape["tie_word_embeddings"] = True
    if family == "qwen3_5_moe":  # widths of whole blocks; the oracle has experts in stacks
        shape |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    if family.startswith("qwen3_5"):  # which layers have attention is a number; blocks of 32 stay within value heads
        shape |= {"layer_types": None, "full_attention_interval": 2, "linear_value_head_dim": 32}
    folder = make_checkpoint(tmp_path / "model", family, seed=int(rng.integers(2**31)), **shape)
    path = write_gguf(folder, family, kind)
    oracle = load_oracle(folder)
    sequence = rng.integers(0, 331, 40).tolist()
    with torch.inference_mode():
        for parameter in oracle.parameters():
            parameter.copy_(rounded(parameter, kind))
        want = oracle(torch.tensor([sequence])).logits[0]
        got = logits(fetch(str(path), None, cache), sequence, rng)
        worst, limit = difference(got, want), 1e-4
        if worst > limit and "moe" in family:  # two experts may be as good: then rounding chooses, the oracle's own too
            limit = max(difference(nudged(oracle)(torch.tensor([sequence])).logits[0], want) for _ in range(8))
    assert worst <= max(1e-4, 2 * limit), f"relative difference {worst:.2e}"


def difference(logits: torch.Tensor, others: torch.Tensor) -> float:
    return ((logits - others).abs().amax(-1) / others.abs().amax(-1)).max().item()


def test_layers_that_draft_are_left_out(tmp_path: Path, cache: str, rng: np.random.Generator) -> None:
    shape = {"layer_types": None, "full_attention_interval": 2}
    folder = make_checkpoint(tmp_path / "model", "qwen3_5", seed=int(rng.integers(2**31)), **shape)
    unpacked = fetch(str(write_gguf(folder, "qwen3_5", num_drafting=1)), None, cache)
    assert len(read_architecture(unpacked).layers) == len(read_architecture(folder).layers)
    sequence = rng.integers(0, 331, 30).tolist()
    torch.testing.assert_close(logits(unpacked, sequence, rng), logits(folder, sequence, rng), rtol=1e-4, atol=1e-4)


def test_stacked_experts_are_taken_apart(tmp_path: Path, cache: str, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", norm_topk_prob=True)
    sequence = rng.integers(0, 331, 30).tolist()
    unpacked = fetch(str(write_gguf(folder, "qwen3_moe")), None, cache)
    torch.testing.assert_close(logits(unpacked, sequence, rng), logits(folder, sequence, rng))


def test_the_tokenizer_of_the_metadata_encodes_and_decodes(tmp_path: Path, cache: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    path = write_gguf(folder, "qwen3")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    unpacked = fetch(str(path), None, cache)
    tokenizer = transformers.AutoTokenizer.from_pretrained(unpacked)
    text = "hello world<|im_end|>the lazy dog, 12 Käse"
    ids = tokenizer.encode(text)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    # The second time nothing is written again.
    before = (unpacked / "config.json").stat().st_mtime_ns
    assert fetch(str(path), None, cache) == unpacked
    assert (unpacked / "config.json").stat().st_mtime_ns == before


def test_at_any_byte_a_full_disk_leaves_no_part_of_a_folder(
    tmp_path: Path, cache: str, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    path = write_gguf(folder, "qwen3")
    whole = contents(fetch(str(path), None, cache))
    largest = max(len(data) for name, data in whole.items() if name != LINK_NAME)
    for _ in range(8):
        shutil.rmtree(cache)
        with room_for(int(rng.integers(largest))), pytest.raises(OSError, match="File too large"):
            fetch(str(path), None, cache)
        for left in (one for one in Path(cache).rglob("*") if one.is_file() and not one.is_symlink()):
            assert left.read_bytes() == whole[left.name], "whole, under its own name"
        assert contents(fetch(str(path), None, cache)) == whole


def test_what_is_no_gguf_is_refused(tmp_path: Path, cache: str) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*x\.gguf as GGUF") as raised:
        fetch(str(tmp_path / "x.gguf"), None, cache)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"G", b"GGUF", b"GGUF\3\0\0\0", b"not GGUF"])
def test_a_stump_of_a_file_is_refused_in_a_sentence(tmp_path: Path, cache: str, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=r"as GGUF: (the file is empty|it ends within its header|it )"):
        fetch(str(tmp_path / "x.gguf"), None, cache)


def test_another_architecture_is_refused(tmp_path: Path, cache: str) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        InvalidCheckpoint, match="architecture mamba is not supported; supported: arcee, bert, gemma-embedding"
    ):
        fetch(str(tmp_path / "x.gguf"), None, cache)


def test_the_load_format_must_fit_the_files(tmp_path: Path, cache: str, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    unpacked = fetch(str(write_gguf(folder, "qwen3")), None, cache)
    kernels = TorchKernels("float32", "cpu")
    load_model(unpacked, read_architecture(unpacked), kernels, "gguf")
    for wrong, place in (("safetensors", unpacked), ("gguf", folder)):
        with pytest.raises(InvalidCheckpoint, match=f"has no {wrong} weights, which --load-format asks for"):
            load_model(place, read_architecture(place), kernels, wrong)


@pytest.mark.parametrize("kind", [None, "BF16", "F16"])
def test_a_file_of_floats_can_be_quantized(kind: str | None, tmp_path: Path, cache: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    unpacked = fetch(str(write_gguf(folder, "qwen3", kind)), None, cache)
    assert choose_formats(unpacked, None) == UNQUANTIZED
    assert choose_formats(unpacked, "int8") == QUANTIZATIONS["int8"]


def test_a_file_of_blocks_is_quantized_already(tmp_path: Path, cache: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", hidden_size=64, intermediate_size=96)
    unpacked = fetch(str(write_gguf(folder, "qwen3", "Q8_0")), None, cache)
    with pytest.raises(InvalidConfig, match="is quantized already"):
        choose_formats(unpacked, "int8")


def test_the_long_rope_of_phi3_comes_from_its_tensors(tmp_path: Path, cache: str, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path / "model", "phi3", rope_parameters=LONG_ROPE, **PARTS)
    unpacked = fetch(str(write_gguf(folder, "phi3")), None, cache)
    sequence = rng.integers(0, 331, 40).tolist()
    assert read_architecture(unpacked).context_form == "long"
    torch.testing.assert_close(logits(unpacked, sequence, rng), logits(folder, sequence, rng), rtol=1e-4, atol=1e-4)


def test_the_rope_of_llama3_comes_from_its_tensor(tmp_path: Path, cache: str, rng: np.random.Generator) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    folder = make_checkpoint(tmp_path / "model", "llama", rope_parameters=rope)
    unpacked = fetch(str(write_gguf(folder, "llama")), None, cache)
    sequence = rng.integers(0, 331, 60).tolist()
    torch.testing.assert_close(logits(unpacked, sequence, rng), logits(folder, sequence, rng), rtol=1e-4, atol=1e-4)


def test_a_sibling_that_comes_later_is_seen(tmp_path: Path, cache: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    path = write_gguf(folder, "qwen3")
    (folder / "tokenizer_config.json").unlink()
    stored = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    assert (fetch(str(path), None, cache) / "tokenizer.json").read_bytes() != stored
    (folder / "tokenizer.json").write_bytes(stored)
    assert (fetch(str(path), None, cache) / "tokenizer.json").read_bytes() == stored


def test_the_sampling_in_the_metadata_is_the_default(tmp_path: Path, cache: str) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_sampling_temp(0.25)
        writer.add_sampling_top_k(20)

    folder = make_checkpoint(tmp_path / "model", "qwen3")
    path = write_gguf(folder, "qwen3", add=add)
    (folder / "generation_config.json").unlink()
    assert default_sampling(fetch(str(path), None, cache)) == {"temperature": 0.25, "top_k": 20}


def test_experts_of_four_bits_keep_their_codes(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = rng.standard_normal((12, 96)).astype(np.float32)
    stored = quants.quantize(weights, GGMLQuantizationType.MXFP4)
    writer = GGUFWriter(tmp_path / "x.gguf", "gpt-oss")
    for name in ("some", "blk.0.ffn_up_exps.weight"):
        writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType.MXFP4)
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "x.gguf")
    rows = read_rows(file.tensors["some"])
    assert isinstance(rows, Mxfp4Rows)
    want = torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType.MXFP4))
    assert torch.equal(floats(rows), want)
    assert packed_formats(file).for_floats() == PackedFormats(experts=PackedFormat.MXFP4)
