"""Which formats keep what a checkpoint stores: the integers of a quantized one are not rounded a second time."""

from __future__ import annotations

import re
from pathlib import Path

from tokenmill.errors import InvalidConfig
from tokenmill.kernels.formats import QUANTIZATIONS, UNQUANTIZED, Format, Formats, formats
from tokenmill.weights.checkpoint import stored_quantization
from tokenmill.weights.gguf.file import open_gguf
from tokenmill.weights.gguf.folder import LINK_NAME

# llama.cpp's block types, from the fewest bits on, and the first format that holds them.
GGUF_FORMATS = (
    (Format.INT4, {"Q4_0"}),
    (Format.INT4_OFFSET, {"Q4_0", "Q4_1", "Q4_K"}),
    (Format.INT8, {"Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "Q3_K", "Q2_K"}),
)
LAYER_MATRIX = re.compile(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down)(_exps)?)\.weight")
VOCABULARY = ("token_embd.weight", "output.weight")


def choose_formats(folder: Path, quantization: str | None) -> Formats:
    """The formats of a model's matrices.

    Args:
        quantization: what `--quantization` asks for, or None.

    Raises:
        InvalidCheckpoint: the folder's config.json or GGUF file cannot be read.
        InvalidConfig: the checkpoint is quantized, and something else is asked for.
    """
    stored = _stored_formats(folder)
    if quantization is None:
        return stored
    if stored is not UNQUANTIZED:
        raise InvalidConfig(f"--quantization {quantization}: {folder} is quantized already; leave the flag out")
    return QUANTIZATIONS[quantization]


def _stored_formats(folder: Path) -> Formats:
    if (folder / LINK_NAME).exists():
        kinds = {name: tensor.kind for name, tensor in open_gguf(folder / LINK_NAME).tensors.items()}
        layers = {kind for name, kind in kinds.items() if LAYER_MATRIX.fullmatch(name)}
        vocabulary = {kinds[name] for name in VOCABULARY if name in kinds}
        found = _gguf_format(layers), _gguf_format(vocabulary)
        return UNQUANTIZED if found == (Format.BF16, Format.BF16) else formats(*found)
    stored = stored_quantization(folder)
    if stored.bits is None:
        return UNQUANTIZED
    if stored.bits == 8:
        return formats(Format.INT8)
    return formats(Format.INT4 if stored.is_symmetric else Format.INT4_OFFSET)


def _gguf_format(kinds: set[str]) -> Format:
    return next((chosen for chosen, fitting in GGUF_FORMATS if kinds <= fitting), Format.BF16)
