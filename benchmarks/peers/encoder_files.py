"""An encoder of BERT's kind as GGUF and as ONNX: what llama.cpp and ONNX Runtime run.

Each format is written by the environment of the engine that reads it, once, into a folder:

    python -m benchmarks.peers.encoder_files gguf CHECKPOINT FOLDER     F32, F16, BF16, Q8_0
    python -m benchmarks.peers.encoder_files onnx CHECKPOINT FOLDER     float32, int8
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0")
SPECIAL_TOKENS = {"bos": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]"}
# Rows that are added to each token's: small, and floats in files of every type, as llama.cpp's own converter has them.
FLOATS = ("position_embd", "token_types")


def write_gguf(checkpoint: Path, folder: Path) -> None:
    """Write a file of each type, with the tokenizer; norms and biases are float32."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    tensors = load_file(checkpoint / "model.safetensors")
    for kind in GGUF_TYPES:
        writer = gguf.GGUFWriter(folder / f"{kind}.gguf", gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.BERT])
        _add_config(writer, config, gguf)
        _add_word_pieces(writer, checkpoint, gguf)
        for stored, values in tensors.items():
            stem, _, suffix = stored.removeprefix("bert.").rpartition(".")
            if stem == "pooler.dense" or not (name := names.get_name(stem)):
                continue
            quantized = gguf.GGMLQuantizationType[kind if values.ndim == 2 and name not in FLOATS else "F32"]
            packed = gguf.quants.quantize(values.astype(np.float32), quantized)
            writer.add_tensor(f"{name}.{suffix}", packed, raw_dtype=quantized)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_config(writer: Any, config: dict[str, Any], gguf: Any) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)


def _add_word_pieces(writer: Any, checkpoint: Path, gguf: Any) -> None:
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    special = SPECIAL_TOKENS.values()
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [one if one in special else one[2:] if one.startswith("##") else f"\u2581{one}" for one in tokens]
    )
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if one in special else kinds.NORMAL for one in tokens])
    writer.add_token_type_count(2)
    for name, token in SPECIAL_TOKENS.items():
        getattr(writer, f"add_{name}_token_id")(vocabulary[token])


def write_onnx(checkpoint: Path, folder: Path) -> None:
    """Write float32, with attention, GELU and LayerNorm as one node each, and from it int8 of each output channel."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoModel

    class States(torch.nn.Module):
        """The last layer's states of ids and a mask."""

        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            """Return [texts, tokens, hidden]."""
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    plain, whole = folder / "exported.onnx", folder / "float32.onnx"
    inputs = torch.ones(2, 7, dtype=torch.int64)
    axes = {name: {0: "texts", 1: "tokens"} for name in ("input_ids", "attention_mask", "states")}
    torch.onnx.export(
        States(),
        (inputs, inputs),
        plain,
        input_names=["input_ids", "attention_mask"],
        output_names=["states"],
        dynamic_axes=axes,
        dynamo=False,
    )
    config = json.loads((checkpoint / "config.json").read_text())
    optimized = optimize_model(
        str(plain),
        model_type="bert",
        num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
    )
    print("nodes made of several:", optimized.get_fused_operator_statistics(), file=sys.stderr)
    optimized.save_model_to_file(str(whole))
    # The type of what comes out of nodes that are no ONNX of the standard.
    floats = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    target = folder / "int8.onnx"
    quantize_dynamic(whole, target, per_channel=True, weight_type=QuantType.QInt8, extra_options=floats)


if __name__ == "__main__":
    {"gguf": write_gguf, "onnx": write_onnx}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
