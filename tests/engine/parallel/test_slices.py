"""A rank reads its rows and no others: the right ones, whatever form they are stored in, and how many bytes that is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.model.weights.gguf_writer import write_gguf
from tests.model.weights.quantized_layouts import CASES, quantize
from tests.model.weights.test_checkpoint import parameters
from tests.model.weights.test_stacked_experts import packed
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.quantization.packed import Mxfp4Rows, QuantizedRows, dense
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.sharding.collective import Alone
from tokenmill.model.sharding.shard import Part, Shard
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.hub import fetch
from tokenmill.model.weights.loader import load_model, plan_model
from tokenmill.model.weights.sharing import content_of

# Of a rank's bytes: norms, biases of what is whole, the tables of quantization and the like.
SURPLUS = 0.02
# Where ranks sum, of the second matrices: the scales of all groups, here of 16 numbers.
SCALES = 0.05


class Rank(Alone):
    """A rank that meets nobody: it is only asked what it has."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard  # type: ignore[misc]


def part_of(folder: Path, shard: Shard, load_format: str = "auto") -> Decoder:
    kernels = TorchKernels("float32", "cpu")
    return plan_model(folder, read_architecture(folder), kernels, load_format, Rank(shard)).load()


def check_parts(folder: Path, size: int, load_format: str = "auto", sums: bool = False) -> None:
    """Each rank's tensors are its rows of the whole ones, bit for bit; or its columns, where ranks sum."""
    whole = parameters(load_model(folder, read_architecture(folder), TorchKernels("float32", "cpu"), load_format))
    architecture = read_architecture(folder)
    attention = architecture.layers[0].attention
    seen: dict[str, list[torch.Tensor]] = {}
    for rank in range(size):
        shard = Shard(rank, size, sums=sums)
        decoder = part_of(folder, shard, load_format)
        heads, kv_heads = shard.heads(attention)
        own = numbered(parameters(decoder), decoder)
        for name, tensor in own.items():
            rows, columns = len(whole[name]), slice(None)
            if sums and name.endswith(("o_proj.weight", "down_proj.weight")):
                inner = heads.times(attention.head_dim) if "o_proj" in name else shard.part(whole[name].shape[1])
                part, columns = Part.whole(rows), slice(inner.start, inner.stop)
            elif sums and name.endswith(("o_proj.bias", "down_proj.bias")):
                assert rank == 0, "one adds it"
                part = Part.whole(rows)
            elif "q_proj" in name:
                part = heads.times(attention.head_dim)
            elif "k_proj" in name or "v_proj" in name:
                part = kv_heads.times(attention.head_dim)
            elif "norm" in name or (".experts." in name and not sums) or "mlp.gate.weight" in name:
                part = Part.whole(rows)
            else:
                part = shard.part(rows)
            wanted = whole[name][part.start : part.stop]
            wanted = wanted if columns == slice(None) else wanted[:, columns]
            assert torch.equal(tensor, wanted), f"rank {rank} of {size}: {name}"
            seen.setdefault(name, []).append(tensor)
    assert seen.keys() == whole.keys(), "every tensor is somebody's"


def numbered(own: dict[str, torch.Tensor], decoder: Decoder) -> dict[str, torch.Tensor]:
    """A rank counts its experts from 0: by the numbers that all ranks know them by."""
    part = getattr(decoder.layers[0].mlp, "part", Part.whole(0))
    found = {}
    for name, tensor in own.items():
        before, experts, rest = name.partition(".experts.")
        number, _, last = rest.partition(".")
        found[f"{before}.experts.{int(number) + part.start}.{last}" if experts else name] = tensor
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "granite", "qwen3_moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_rows(family: str, size: int, tmp_path: Path, rng: np.random.Generator) -> None:
    # An odd vocabulary, and KV heads that several ranks share.
    kv_heads = int(rng.choice([1, 2, 4]))
    biases = {"attention_bias": True} | ({"mlp_bias": True} if family in ("llama", "granite") else {})
    make_checkpoint(
        tmp_path,
        family,
        seed=int(rng.integers(2**31)),
        tokenizer=False,
        num_key_value_heads=kv_heads,
        max_shard_size="40KB",
        **({} if family == "qwen2" else biases),
    )
    check_parts(tmp_path, size)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_its_rows_of_a_quantized_checkpoint(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, intermediate_size=64)
    quantize(tmp_path, *CASES[case], rng)
    check_parts(tmp_path, 2)


# What a rank has of a quantized matrix begins and ends with groups of 16; within groups; within words of 8, which only
# layouts can have that pack no outputs. Of the last two the KV heads are fewer than the ranks, or one for each.
CUTS: dict[str, tuple[int, dict[str, int]]] = {
    "groups": (2, {"intermediate_size": 64, "num_key_value_heads": 1}),
    "parts of groups": (2, {"intermediate_size": 48, "head_dim": 8, "num_attention_heads": 6}),
    "parts of words": (4, {"intermediate_size": 112, "head_dim": 4, "num_attention_heads": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_rank_that_sums_has_its_rows_and_columns_of_a_quantized_checkpoint(
    case: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    for cut, (size, shape) in CUTS.items():
        folder = make_checkpoint(tmp_path / cut, "qwen3", tokenizer=False, **shape)
        quantize(folder, *CASES[case], rng)
        if cut != "parts of words" or case in ("packed 4", "packed 8", "int8"):
            check_parts(folder, size, sums=True)


# Family and type, and an inner size of which a rank's half ends within a block of 32, or of 256.
FILES: list[tuple[str, str, dict[str, int]]] = [
    ("llama", "Q8_0", {"intermediate_size": 96}),
    ("qwen3", "Q4_0", {"intermediate_size": 96}),
    ("granite", "Q5_1", {"intermediate_size": 96, "head_dim": 32}),
    ("gemma3", "BF16", {}),
    ("phi3", "F16", {}),
    ("qwen3_moe", "Q4_1", {"moe_intermediate_size": 96}),
    ("gpt_oss", "Q8_0", {"intermediate_size": 96}),
    ("qwen2", "TQ2_0", {"hidden_size": 256, "intermediate_size": 768, "num_key_value_heads": 1}),
]


@pytest.mark.parametrize(("family", "kind", "shape"), FILES)
def test_each_rank_that_sums_has_its_rows_and_columns_of_a_gguf_file(
    family: str, kind: str, shape: dict[str, int], tmp_path: Path, rng: np.random.Generator
) -> None:
    seed, shape = int(rng.integers(2**31)), {"hidden_size": 64, "intermediate_size": 64, **shape}
    stored = write_gguf(make_checkpoint(tmp_path / "model", family, seed=seed, **shape), family, kind)
    check_reads(fetch(str(stored), None, str(tmp_path / "cache")), QuantizedRows | StoredArray)


def test_each_rank_that_sums_has_its_rows_and_columns_of_experts_in_mxfp4(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 192}  # of three groups of 32 for each
    folder = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False, **shape)
    packed(folder, rng)
    check_reads(folder, Mxfp4Rows)


def check_reads(folder: Path, of_experts: Any) -> None:
    """Check that each of two ranks reads its part of what one reads, bit for bit; experts are read as `of_experts`."""
    architecture, kernels = read_architecture(folder), TorchKernels("float32", "cpu")
    alone = plan_model(folder, architecture, kernels)
    begins = {target.key: target.part.start for target in alone.shapes.targets()}
    whole = {read.key: dense(read.rows()).float32() for read in alone.reads or ()}
    for rank in range(2):
        plan = plan_model(folder, architecture, kernels, collective=Rank(Shard(rank, 2, sums=True)))
        targets, num_cut = {target.key: target for target in plan.shapes.targets()}, 0
        for read in plan.reads or ():
            target, rows = targets[read.key], read.rows()
            start, columns = target.part.start - begins[read.key], target.columns
            wanted = whole[read.key][start : start + target.part.count]
            wanted = wanted if columns is None else wanted[:, columns.start : columns.stop]
            assert np.array_equal(dense(rows).float32(), wanted), f"rank {rank}: {read.key}"
            assert target.key.expert is None or target.key.kind == "bias" or isinstance(rows, of_experts)
            num_cut += columns is not None
        experts = max(1, getattr(architecture.layers[0].mlp, "num_experts", 0))
        assert num_cut == len(architecture.layers) * (1 + experts), "attention's and every block's second matrix"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_rank_has_its_rows_of_a_gguf_file(
    family: str, kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96}
    folder = make_checkpoint(tmp_path / "model", family, seed=int(rng.integers(2**31)), **shape)
    check_parts(fetch(str(write_gguf(folder, family, kind)), None, str(tmp_path / "cache")), 2)


def test_each_rank_has_its_stacked_experts(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", seed=int(rng.integers(2**31)))
    check_parts(fetch(str(write_gguf(folder, "qwen3_moe")), None, str(tmp_path / "cache")), 2)


def test_random_weights_are_the_same_for_ranks_and_for_one(tmp_path: Path) -> None:
    for family in ("qwen3", "qwen3_moe"):
        check_parts(make_checkpoint(tmp_path / family, family, tokenizer=False), 2, "dummy")


def test_outputs_that_share_a_number_cannot_go_to_different_ranks(tmp_path: Path, rng: np.random.Generator) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, hidden_size=32, intermediate_size=64, head_dim=16)
    quantize(tmp_path, *CASES["awq"], rng)
    # 8 outputs in a word; 8 ranks would have 4 hidden numbers each.
    kernels, rank = TorchKernels("float32", "cpu"), Rank(Shard(0, 8))
    plan = plan_model(tmp_path, read_architecture(tmp_path), kernels, collective=rank)
    with pytest.raises(InvalidCheckpoint, match="packs 8 outputs in a number, which ranks cannot share"):
        plan.load()


def test_a_surplus_tensor_is_refused_though_other_experts_are_not_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    path = tmp_path / "model.safetensors"
    from safetensors.torch import load_file

    save_file({**load_file(path), "model.layers.0.mlp.experts.9.extra": torch.ones(2)}, path)
    with pytest.raises(InvalidCheckpoint, match=r"experts\.9\.extra has no place"):
        part_of(tmp_path, Shard(0, 2))


@pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
def test_packed_weights_are_kept_for_each_rank_by_itself(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, vocab_size=332)  # both ranks' matrices are of the same sizes
    keys = []
    for shard in (Shard(), Shard(0, 2), Shard(1, 2), Shard(0, 2)):
        kernels, _ = select_kernels("native", "cpu", "bfloat16", 1)
        plan = plan_model(tmp_path, read_architecture(tmp_path), kernels, collective=Rank(shard))
        keys.append(content_of(plan, tmp_path).key)
    assert keys[1] == keys[3]
    assert len(set(keys)) == 3


READ = """
import sys
from pathlib import Path
import torch
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.sharding.collective import Alone
from tokenmill.model.sharding.shard import Shard
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import plan_model

def count():
    return int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])

folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
collective = Alone()
collective.shard = Shard(rank, size, sums=sys.argv[4:] == ["sums"])
architecture, kernels = read_architecture(folder), TorchKernels("float32", "cpu")
# What reading imports is read, too.
plan_model(folder, architecture, kernels, collective=collective).load()
before = count()
plan_model(folder, architecture, kernels, collective=collective).load()
print(count() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what is read")
@pytest.mark.parametrize("form", [(), ("sums",)], ids=["rows", "sums"])
@pytest.mark.parametrize("stored", ["floats", "gptq 4", "Q8_0"])
def test_a_rank_reads_its_share_of_the_bytes(
    stored: str, form: tuple[str, ...], tmp_path: Path, rng: np.random.Generator
) -> None:
    """As the system counts them: nothing is mapped, or read and left out."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 1024}
    folder = make_checkpoint(tmp_path / "model", "qwen3", **shape)
    (weights,) = folder.glob("*.safetensors")
    if stored in CASES:
        quantize(folder, *CASES[stored], rng)
    elif stored != "floats":
        folder = fetch(str(write_gguf(folder, "qwen3", stored)), None, str(tmp_path / "cache"))
        (weights,) = (tmp_path / "model").glob("*.gguf")
    total = weights.stat().st_size
    for rank, size in ((1, 2), (2, 4)):
        done = subprocess.run(
            [sys.executable, "-c", READ, str(folder), str(rank), str(size), *form],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        read = int(json.loads(done.stdout))
        most = 1 / size + SURPLUS + (SCALES if form and stored in CASES else 0)
        assert 0.9 * total / size < read < total * most, f"{read} of {total} bytes, rank {rank}"


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_say_once_what_is_left_out(
    size: int, num_stages: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    for number in range(size * num_stages):
        part_of(tmp_path, Shard.from_rank(number, size, num_stages))
    (record,) = caplog.records
    assert "tensor lm_head.weight is left out" in record.getMessage()
