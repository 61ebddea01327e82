"""A checkpoint to GGUF: bfloat16 through the gguf package, the quantized types by llama.cpp's own quantizer.

Without a tokenizer, which llama.cpp needs for text only. Runs in the environment of llama.cpp.

    python -m benchmarks.peers.gguf_model CHECKPOINT FOLDER     a folder of safetensors; or a GGUF file of floats
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors import deserialize

BF16 = "BF16"
FORMATS = {
    BF16: llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def convert(checkpoint: Path, folder: Path) -> None:
    """Write a file of each of `FORMATS` into the folder."""
    if checkpoint.is_dir():
        whole = folder / f"{BF16}.gguf"
        write_bf16(checkpoint, whole)
        _quantize(whole, folder, [name for name in FORMATS if name != BF16])
    else:
        _quantize(checkpoint, folder, FORMATS)


def _quantize(whole: Path, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = FORMATS[name]
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(folder / f"{name}.gguf").encode(), params) != 0:
            raise RuntimeError(f"llama.cpp cannot quantize to {name}")


def write_bf16(checkpoint: Path, target: Path) -> None:
    """Write a Qwen3 or Gemma 3 checkpoint; norms in float32, as llama.cpp's own converter does."""
    config = json.loads((checkpoint / "config.json").read_text())
    is_gemma = config["model_type"] == "gemma3_text"
    architecture = gguf.MODEL_ARCH.GEMMA3 if is_gemma else gguf.MODEL_ARCH.QWEN3
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    _add_config(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in deserialize((checkpoint / "model.safetensors").read_bytes()):
        bits = np.frombuffer(tensor["data"], np.uint16).reshape(tensor["shape"])
        target_name = names.get_name(name, try_suffixes=(".weight",))
        if bits.ndim == 1:
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(target_name, values + 1 if is_gemma else values)
        else:
            writer.add_tensor(target_name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "gemma3_text":
        rope = rope["full_attention"]
        writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rope["rope_theta"])


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
