"""Measure the quality of quantization: perplexity on held-out text of the demo model, and agreement with bfloat16.

    python benchmarks/quantization.py [--samples 400] [--seed 0] [--document docs/quantization.md]

Every conversation is held out: its generator never gave it to the training. Counted are the tokens that the assistant
says. `agreement` is the share of them whose most likely token is the one that bfloat16 finds most likely. The last line
is one JSON document; --document puts the table between its marks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.registry import AttentionConfig, choose_attention
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.quantization.packed import QUANTIZATIONS, UNQUANTIZED, PackedFormat, PackedFormats
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import load_model
from tokenmill.platform.cpu import CpuPlatform

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "src" / "tokenmill" / "demo" / "model"
PAGE_SIZE = 16
BEGIN, END = "<!-- measured: written by benchmarks/quantization.py -->\n", "<!-- end of measured -->"


@dataclass(frozen=True)
class Way:
    """One way of storing weights and KV."""

    name: str
    formats: PackedFormats = field(default_factory=lambda: UNQUANTIZED)
    kv_dtype: torch.dtype | None = None


WAYS = (
    Way("bfloat16"),
    Way("--quantization int8", QUANTIZATIONS["int8"]),
    Way("--quantization int4", QUANTIZATIONS["int4"]),
    Way("int4 with offsets (as AWQ, Q4_K)", PackedFormats(PackedFormat.INT4_OFFSET, PackedFormat.INT8)),
    Way("int4, the vocabulary in bfloat16", PackedFormats(PackedFormat.INT4)),
    Way("--kv-cache-dtype int8", kv_dtype=torch.int8),
    Way("int8 and int8 KV", QUANTIZATIONS["int8"], torch.int8),
)


@dataclass(frozen=True)
class Text:
    """A rendered conversation: token ids [n], and which of them the assistant says [n]."""

    ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Row:
    """One line of the table; bytes of all matrices."""

    way: str
    weight_bytes: int
    perplexity: float
    agreement: float


def held_out(samples: int, seed: int) -> Iterator[Text]:
    """As many conversations of each skill."""
    sys.path.insert(0, str(ROOT / "examples" / "train_demo"))
    from data import Encoder
    from skills import SKILLS

    rng = random.Random(seed)
    drawn = [SKILLS[name](rng, "heldout") for _ in range(max(1, samples // len(SKILLS))) for name in SKILLS]
    for row in Encoder(MODEL).rows(drawn):
        yield Text(torch.from_numpy(row.ids), torch.from_numpy(row.mask))


def logits_of(decoder: Decoder, attention: Any, ids: torch.Tensor) -> torch.Tensor:
    """[n, vocab_size] of one sequence, run whole on pages 1, 2, ..."""
    length = len(ids)
    pages = np.arange(1, -(-length // PAGE_SIZE) + 1, dtype=np.int32)
    positions = torch.arange(length)
    batch = ForwardBatch(
        token_ids=ids,
        positions=positions,
        slots=positions + PAGE_SIZE,
        page_table=torch.from_numpy(pages[None]),
        query_lens=np.array([length], np.int32),
        context_lens=np.array([length], np.int32),
        query_starts=np.array([0, length], np.int32),
        output_indices=positions,
    )
    with torch.inference_mode():
        return decoder.logits(decoder.forward(batch, attention))


Choices = list[torch.Tensor]
"""Per text, the most likely token at each place where the assistant says one."""


def measure(way: Way, texts: list[Text], best: Choices | None) -> tuple[Row, Choices]:
    """Run all texts; agreement is with `best`, or with itself if there is none."""
    kernels, _ = select_kernels("native", "cpu", "bfloat16", 1, way.formats)
    decoder = load_model(MODEL, read_architecture(MODEL), kernels)
    num_pages = 2 + max(len(text.ids) for text in texts) // PAGE_SIZE
    wanted = (decoder.attention_spec, PAGE_SIZE, torch.bfloat16, CpuPlatform(), way.kv_dtype, kernels.native)
    attention = choose_attention("native", AttentionConfig(*wanted)).make(num_pages + 1)
    loss, choices = 0.0, []
    for text in texts:
        wanted = text.mask[1:]
        logits = logits_of(decoder, attention, text.ids)[:-1][wanted]
        loss += cross_entropy(logits, text.ids[1:][wanted], reduction="sum").item()
        choices.append(logits.argmax(-1))
    same = sum((one == other).sum().item() for one, other in zip(choices, best or choices, strict=True))
    count = sum(map(len, choices))
    return Row(way.name, matrix_bytes(decoder), math.exp(loss / count), same / count), choices


def matrix_bytes(decoder: Decoder) -> int:
    """Of the embedding, the head if it is another, and all layers."""
    layers = [layer for each in decoder.layers for layer in (each.attention.qkv, each.attention.output)]
    layers += [linear for each in decoder.layers for linear in (each.mlp.gate_up, each.mlp.down)]
    return sum(linear.weight.num_bytes for linear in layers) + decoder.embedding.num_bytes


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = ["| weights and KV | matrices, MB | perplexity | agreement with bfloat16 |", "|---|---|---|---|"]
    lines += [
        f"| {row.way} | {row.weight_bytes / 1e6:.1f} | {row.perplexity:.4f} | {row.agreement:.2%} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every way and print the table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--document", type=Path, help="a Markdown file with marks for the table")
    options = parser.parse_args()
    texts = list(held_out(options.samples, options.seed))
    rows: list[Row] = []
    best: Choices | None = None
    for way in WAYS:
        row, choices = measure(way, texts, best)
        best = best or choices
        rows.append(row)
        print(f"{row.way}: perplexity {row.perplexity:.4f}, agreement {row.agreement:.2%}", file=sys.stderr)
    print(table(rows))
    if options.document is not None:
        before, rest = options.document.read_text().split(BEGIN)
        options.document.write_text(before + BEGIN + table(rows) + END + rest.split(END, 1)[1])
    tokens = int(sum(text.mask[1:].sum() for text in texts))
    print(json.dumps({"benchmark": "quantization", "tokens": tokens, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
