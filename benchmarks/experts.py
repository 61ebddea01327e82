"""Decode steps of a model of gpt-oss-20b's shape with four layers: experts in mxfp4, and the same rounded to int4.

    python benchmarks/experts.py [--layers 4] [--tokens 48] [--rounds 5]

Random weights in checkpoints that are made first (8 GB in a temporary folder). Each form decodes one request in turns;
printed are medians of tokens a second, and of bytes of weights, which a token reads all of but the embeddings and the
experts that it does not have. The int4 form has its other matrices in int4 too, the mxfp4 form in bfloat16. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from tokenmill import LLM, SamplingParams
from tokenmill.lab.bench.report import machine_facts

HIDDEN, EXPERTS, PER_TOKEN, VOCABULARY = 2880, 32, 4, 4096
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 64


def make_checkpoint(folder: Path, layers: int, quantized: bool) -> None:
    """A checkpoint without a tokenizer; experts in mxfp4, or the same numbers in bfloat16."""
    config: dict[str, object] = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": layers,
        "num_local_experts": EXPERTS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if quantized:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": drawn(generator, VOCABULARY, HIDDEN)}
    tensors |= {
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
        "lm_head.weight": drawn(generator, VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        tensors |= {f"model.layers.{layer}.{name}": one for name, one in layer_tensors(generator, quantized).items()}
    folder.mkdir()
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, "w0")).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Of the size of trained weights."""
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()


def layer_tensors(generator: torch.Generator, quantized: bool) -> dict[str, torch.Tensor]:
    """All of a layer, by name."""
    sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    found = {"input_layernorm.weight": torch.ones(HIDDEN), "post_attention_layernorm.weight": torch.ones(HIDDEN)}
    for name, size in sizes.items():
        found |= {
            f"self_attn.{name}.weight": drawn(generator, size, HIDDEN),
            f"self_attn.{name}.bias": torch.zeros(size),
        }
    found |= {
        "self_attn.o_proj.weight": drawn(generator, HIDDEN, HEADS * HEAD_DIM),
        "self_attn.o_proj.bias": torch.zeros(HIDDEN),
    }
    found |= {"self_attn.sinks": torch.zeros(HEADS), "mlp.router.bias": torch.zeros(EXPERTS)}
    found["mlp.router.weight"] = drawn(generator, EXPERTS, HIDDEN)
    for name, outputs in {"gate_up_proj": 2 * HIDDEN, "down_proj": HIDDEN}.items():
        found[f"mlp.experts.{name}_bias"] = torch.zeros(EXPERTS, outputs)
        if quantized:
            shape = (EXPERTS, outputs, HIDDEN // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(118, 121, shape, dtype=torch.uint8, generator=generator)
            found |= {f"mlp.experts.{name}_blocks": blocks, f"mlp.experts.{name}_scales": scales}
        else:
            found[f"mlp.experts.{name}"] = drawn(generator, EXPERTS, HIDDEN, outputs)
    return {name: one if one.dtype == torch.uint8 else one.bfloat16() for name, one in found.items()}


def tokens_per_second(llm: LLM, tokens: int) -> float:
    """Of one request's decodes, its prompt left out."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    stamps = [time.perf_counter() for _ in llm.stream({"prompt_token_ids": [7, 8, 9]}, params)]
    return (len(stamps) - 1) / (stamps[-1] - stamps[0])


def read_bytes(weight_bytes: int, kind: str, layers: int) -> float:
    """Of the weights, by one token. Both forms have 4 bits a number of an expert, and 16 for the scale of each 32."""
    experts = layers * EXPERTS * 3 * HIDDEN * HIDDEN * 18 / 32
    embedding = VOCABULARY * HIDDEN * (2 if kind == "mxfp4" else 1)
    return weight_bytes - embedding - experts * (1 - PER_TOKEN / EXPERTS)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for kind in ("mxfp4", "int4"):
            make_checkpoint(Path(name) / kind, given.layers, quantized=kind == "mxfp4")
        llms = {
            "mxfp4": LLM(Path(name) / "mxfp4", num_pages=64, max_num_seqs=1),
            "int4": LLM(Path(name) / "int4", num_pages=64, max_num_seqs=1, quantization="int4"),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in llms}
        for _ in range(given.rounds):
            for kind, llm in llms.items():
                rates[kind].append(tokens_per_second(llm, given.tokens))
    document: dict[str, object] = {"benchmark": "experts", "layers": given.layers, "machine": machine_facts()}
    for kind, own in rates.items():
        median = statistics.median(own)
        num_bytes = read_bytes(llms[kind].info.weight_bytes, kind, given.layers)
        found = {"tokens_per_second": median, "spread": [min(own), max(own)], "bytes_per_second": median * num_bytes}
        document[kind] = found
        print(f"{kind:6} {median:7.1f} tokens/s, {min(own):.1f} to {max(own):.1f}; {median * num_bytes / 1e9:.1f} GB/s")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
