"""Adapters within the native pass: near peft, whatever their shape, and each row's bits its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import load_oracle, make_checkpoint
from tests.model.adapters.trained import LINEARS, make_adapter
from tests.model.models.test_native_decoder import load, native_attention
from tests.paging import PagedRequests, in_arrays, random_schedule
from tokenmill.model.adapters.packing import AdapterForm, AdapterReader
from tokenmill.model.kernels.adapters import Adapter, AdapterRows
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.models.host_decoder import array_of
from tokenmill.model.models.host_model import on_host
from tokenmill.model.models.native_decoder import NativeDecoder
from tokenmill.model.quantization.packed import UNQUANTIZED

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

# Widths that fill no vector, panel or block; ranks that fill no piece; some of the modules only.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 72, "intermediate_size": 88, "attention_bias": True},
    "llama": {"hidden_size": 64, "intermediate_size": 200, "mlp_bias": True, "head_dim": 32},
    "granite": {"hidden_size": 96, "intermediate_size": 50, "head_dim": 16},
    "arcee": {"hidden_size": 64, "intermediate_size": 104},
    "olmo2": {"hidden_size": 64, "intermediate_size": 80},
    "qwen3_moe": {"hidden_size": 64},
    # Keys that are values have the adapter's part, too.
    "gemma4_moe": {"hidden_size": 64, "enable_moe_block": False, "num_experts": None},
}
ADAPTERS: list[dict[str, Any]] = [
    {"r": 1, "lora_alpha": 2},
    {"r": 7, "lora_alpha": 3},
    {"r": 32, "target_modules": ["v_proj", "gate_proj"]},
    {"r": 5, "target_modules": ["up_proj", "down_proj"], "rank_pattern": {"down_proj": 9}},
]


@pytest.mark.parametrize("family", SHAPES)
def test_hidden_states_are_near_those_of_peft(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    import peft

    folder = make_checkpoint(tmp_path / "base", family, tokenizer=False, dtype=torch.bfloat16, **SHAPES[family])
    decoder, native = load(folder, UNQUANTIZED, 2)
    kernels = decoder._kernels
    adapters = []
    # Of experts PEFT trains stacked parameters, which are refused.
    others = {"target_modules": LINEARS[:4], "rank_pattern": {"o_proj": 9}} if family == "qwen3_moe" else {}
    for number, config in enumerate(ADAPTERS):
        make_adapter(folder, tmp_path / str(number), int(rng.integers(2**31)), **{**config, **others})
        adapters.append(
            AdapterReader(decoder, kernels, 64, AdapterForm.ONE_CALL).read(str(tmp_path / str(number))).adapter
        )
    sequences = [rng.integers(0, 331, int(rng.integers(3, 60))).tolist() for _ in range(9)]
    wearing = [number % (len(ADAPTERS) + 1) - 1 for number in range(9)]
    base = load_oracle(folder)
    oracles = [peft.PeftModel.from_pretrained(load_oracle(folder), tmp_path / str(i)).eval() for i in range(4)]
    got = run(decoder, native, sequences, [adapters[i] if i >= 0 else None for i in wearing], rng)
    for sequence, number, own in zip(sequences, wearing, got, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([sequence])
            plain = base(ids).logits[0]
            want = plain if number < 0 else oracles[number](ids).logits[0]
            logits = torch.cat([decoder.logits(row[None]) for row in own]).float()
        distance = (logits - want).abs().mean()
        assert distance < 0.15 * want.std(), f"adapter {number}: {distance} off, of {want.std()}"
        assert number < 0 or (plain - want).abs().mean() > 3 * distance, "the adapter makes a difference"
    # The same alone, whole and without the others.
    for sequence, number, own in zip(sequences, wearing, got, strict=True):
        (alone,) = run(decoder, native, [sequence], [adapters[number] if number >= 0 else None], rng)
        assert torch.equal(torch.stack(alone), torch.stack(own))


def run(
    decoder: Any, native: Any, sequences: list[list[int]], wearing: list[Adapter | None], rng: np.random.Generator
) -> list[list[torch.Tensor]]:
    """The final hidden states of all tokens, computed in random chunks, each sequence with its adapter."""
    requests = PagedRequests(sequences, 16, rng)
    attention = native_attention((decoder, native), requests)
    model = on_host(decoder, attention)
    assert isinstance(model, NativeDecoder), "nothing is an obstacle"
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for chunks in random_schedule([len(one) for one in sequences], 40, rng):
        batch = requests.batch(chunks)
        used = list({id(wearing[i]): wearing[i] for i, _ in chunks if wearing[i] is not None}.values())
        rows = [used.index(wearing[i]) if wearing[i] is not None else -1 for i, count in chunks for _ in range(count)]
        kept = np.arange(len(batch.token_ids))
        adapted = AdapterRows(tuple(one for one in used if one), torch.tensor(rows, dtype=torch.int32))
        batch = msgspec.structs.replace(
            batch, output_indices=torch.from_numpy(kept), adapters=adapted if used else None
        )
        with torch.inference_mode():
            hidden = tensor_over(model.forward(batch, attention))
        start = 0
        for i, count in chunks:
            outputs[i] += hidden[start : start + count]
            start += count
    return outputs


@pytest.mark.parametrize("multiplier", [1.0, 3.0])
def test_embeddings_that_adapters_change_have_the_bits_of_the_decoder_s(
    multiplier: float, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path / "base", "qwen3", tokenizer=False, dtype=torch.bfloat16)
    decoder, native = load(folder, UNQUANTIZED, 1)
    make_adapter(folder, tmp_path / "a", 1, target_modules=["embed_tokens"])
    adapter = AdapterReader(decoder, decoder._kernels, 64, AdapterForm.ONE_CALL).read(str(tmp_path / "a")).adapter
    decoder.architecture = msgspec.structs.replace(decoder.architecture, embedding_multiplier=multiplier)
    requests = PagedRequests([rng.integers(0, 331, 12).tolist() for _ in range(4)], 16, rng)
    attention = native_attention((decoder, native), requests)
    model = on_host(decoder, attention)
    batch, of_row = requests.batch([(i, 12) for i in range(4)]), rng.integers(-1, 1, 48).astype(np.int32)
    hidden = decoder.embed(batch.token_ids, AdapterRows((adapter,), torch.from_numpy(of_row)))
    batch = in_arrays(batch)
    want = model.forward(batch, attention, array_of(hidden))
    got = model.forward(msgspec.structs.replace(batch, adapters=AdapterRows((adapter,), of_row)), attention)
    assert np.array_equal(got, want)
    assert not np.array_equal(got, model.forward(batch, attention)), "the adapter makes a difference"


@pytest.mark.parametrize("family", ["granite", "gemma3"])
def test_embeddings_that_are_multiplied_are_those_of_peft(
    family: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path / "base", family, tokenizer=False, dtype=torch.bfloat16, head_dim=16)
    decoder, native = load(folder, UNQUANTIZED, 1)
    oracle = make_adapter(folder, tmp_path / "a", int(rng.integers(2**31)), target_modules=["embed_tokens", "q_proj"])
    adapter = AdapterReader(decoder, decoder._kernels, 64, AdapterForm.ONE_CALL).read(str(tmp_path / "a")).adapter
    base = load_oracle(folder)
    sequences = [rng.integers(0, 331, int(rng.integers(3, 40))).tolist() for _ in range(6)]
    wearing = [adapter if number % 2 else None for number in range(6)]
    got = run(decoder, native, sequences, wearing, rng)
    for sequence, own, hidden in zip(sequences, wearing, got, strict=True):
        ids = torch.tensor([sequence])
        with torch.inference_mode():
            plain, changed = base(ids).logits[0].float(), oracle(ids).logits[0].float()
            logits = torch.cat([decoder.logits(row[None]) for row in hidden]).float()
        want = plain if own is None else changed
        distance = (logits - want).abs().mean()
        assert distance < 0.15 * want.std(), f"{distance} off, of {want.std()}"
        assert own is None or (plain - changed).abs().mean() > 3 * distance, "the adapter makes a difference"
        (alone,) = run(decoder, native, [sequence], [own], rng)
        assert torch.equal(torch.stack(alone), torch.stack(hidden)), "other rows with adapters change no bit"


def test_rows_that_are_left_out_change_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    """Of the last layer only the rows with outputs are computed: their adapters are still theirs."""
    folder = make_checkpoint(tmp_path / "base", "qwen3", tokenizer=False, dtype=torch.bfloat16)
    decoder, native = load(folder, UNQUANTIZED, 1)
    make_adapter(folder, tmp_path / "a", 1)
    adapter = AdapterReader(decoder, decoder._kernels, 64, AdapterForm.ONE_CALL).read(str(tmp_path / "a")).adapter
    requests = PagedRequests([rng.integers(0, 331, 12).tolist() for _ in range(4)], 16, rng)
    attention = native_attention((decoder, native), requests)
    model = on_host(decoder, attention)
    batch = requests.batch([(i, 12) for i in range(4)])
    adapted = AdapterRows((adapter,), torch.from_numpy(rng.integers(-1, 1, 48).astype(np.int32)))
    kept = np.sort(rng.permutation(48)[:17])
    with torch.inference_mode():
        every, some = (
            model.forward(
                msgspec.structs.replace(batch, output_indices=torch.from_numpy(wanted), adapters=adapted), attention
            )
            for wanted in (np.arange(48), kept)
        )
    assert np.array_equal(every[kept], some)
