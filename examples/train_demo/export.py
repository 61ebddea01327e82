"""Write a run's checkpoint as an ordinary Hugging Face Qwen3 folder (weights in bf16).

python export.py --run runs/main --out ../../src/tokenmill/demo/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from model import ModelShape


def hf_config(shape: ModelShape, ids: dict[str, int]) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "max_window_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """The content of ``generation_config.json``: mild sampling, and both tokens that end a reply."""
    return {
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.95,
        "top_k": 20,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }


def export(run: Path, out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors; the tokenizer must lie in ``out`` already."""
    shape = ModelShape(**json.loads((run / "state.json").read_text())["shape"])
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")}
    tensors = {}
    with safe_open(run / "state.safetensors", "pt") as state:
        for key in state.keys():  # noqa: SIM118 - safe_open is no mapping
            if key.startswith("master/"):
                tensors[key.removeprefix("master/")] = state.get_tensor(key).to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    for name, content in (("config", hf_config(shape, ids)), ("generation_config", generation_config(ids))):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"{sum(t.numel() for t in tensors.values()):,} parameters written to {out}")


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(description="Export a run to a Hugging Face folder")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder that already holds the tokenizer")
    arguments = parser.parse_args()
    export(arguments.run, arguments.out)


if __name__ == "__main__":
    main()
