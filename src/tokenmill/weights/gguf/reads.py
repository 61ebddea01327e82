"""Which GGUF tensors fill which target of a decoder, by llama.cpp's names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.errors import InvalidCheckpoint
from tokenmill.kernels.quantized import QuantizedRows, Rows
from tokenmill.models.architecture import Architecture
from tokenmill.models.linear import Target
from tokenmill.weights.gguf.file import GgufFile, GgufTensor
from tokenmill.weights.gguf.values import read_rows

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
NAME = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufRead:
    """One target's values.

    Attributes:
        expert: which part of a tensor of stacked experts; None: the whole tensor.
        interleaved_heads: llama.cpp's converter has put the pairs that rotate together side by side in each head of
            this many rows; 0: it has not.
    """

    name: str
    tensor: GgufTensor
    expert: int | None = None
    interleaved_heads: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.num_bytes if self.expert is None else self.tensor.num_bytes // self.tensor.shape[0]

    def rows(self) -> Rows:
        """The values, floats or quantized."""
        rows = read_rows(self.tensor)
        if self.expert is not None:
            size = self.tensor.shape[1]
            rows = _pick(rows, slice(self.expert * size, (self.expert + 1) * size))
        if self.interleaved_heads:
            rows = _pick(rows, _halves_apart(rows.shape[0], self.interleaved_heads))
        return rows


def plan_gguf_reads(file: GgufFile, targets: Iterable[Target], architecture: Architecture) -> list[GgufRead]:
    """What to read for the targets, in the order of the file.

    Raises:
        InvalidCheckpoint: a tensor is missing, misshapen or has no place.
    """
    reads = [_read(file, target, architecture) for target in targets]
    surplus = file.tensors.keys() - {read.tensor.name for read in reads} - {"output.weight"}
    if surplus:
        raise InvalidCheckpoint(f"{file.path}: tensor {min(surplus)} has no place in the architecture")
    return sorted(reads, key=lambda read: read.tensor.begin)


def _read(file: GgufFile, target: Target, architecture: Architecture) -> GgufRead:
    name, expert = _gguf_name(target.name)
    tensor = file.tensors.get(name)
    if tensor is None:
        raise InvalidCheckpoint(f"{file.path} has no tensor {name}, which the architecture calls for")
    shape = tensor.shape if expert is None else tensor.shape[1:]
    if shape != target.shape:
        raise InvalidCheckpoint(f"{file.path}: tensor {name} has shape {list(shape)}, expected {list(target.shape)}")
    is_llama = architecture.name in ("LlamaForCausalLM", "MistralForCausalLM")
    rotates = is_llama and re.search(r"self_attn\.[qk]_proj\.", target.name)
    return GgufRead(target.name, tensor, expert, architecture.head_dim if rotates else 0)


def _gguf_name(name: str) -> tuple[str, int | None]:
    if name in TOP:
        return TOP[name], None
    match = NAME.fullmatch(name)
    assert match is not None, f"no decoder has a tensor {name}"
    layer, expert, module, suffix = match.groups()
    if expert is not None:
        return f"blk.{layer}.{EXPERT[module]}.{suffix}", int(expert)
    return f"blk.{layer}.{LAYER[module]}.{suffix}", None


def _halves_apart(num_rows: int, head_dim: int) -> list[int]:
    """Row order that undoes the interleaving: of each head, first the even rows, then the odd ones."""
    inside = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return [head + row for head in range(0, num_rows, head_dim) for row in inside]


def _pick(rows: Rows, index: slice | list[int]) -> Rows:
    if isinstance(rows, QuantizedRows):
        offsets = None if rows.offsets is None else rows.offsets[index]
        return QuantizedRows(rows.bits, rows.values[index], rows.scales[index], offsets)
    return rows[index]
