"""Two ranks of one thread that share a context against one process of two threads: a long prompt and decodes behind it.

    python benchmarks/context.py [--tokens 32768] [--layers 2] [--ranks 2] [--decodes 24] [--quantization none]

Qwen3-0.6B's shape with random weights and fewer layers, of which each takes as long, on the CPU. Both engines are in
memory at once and take turns, a chunk of the prompt at a time and a decode at a time, so that what else the machine
does meets both. Of the prompt: tokens a second of all its steps, and the median quotient of the steps; of decodes the
medians. `work` is the quotient of the processor time. Tokens are compared. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ranks import Contender
from tools.gpu.folders import QWEN3_0_6B, write_config

from tokenmill.config.configs import EngineConfig
from tokenmill.startup.assembly.setup import build_engine

CHUNK = 2048


def contender(folder: Path, size: int, threads: int, options: argparse.Namespace) -> Contender:
    """An engine of so many ranks with the prompt in its queue."""
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        quantization=options.quantization,
        num_threads=threads,
        context_parallel_size=size,
        num_pages=options.tokens // 16 + 16,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        max_model_len=options.tokens + 128,
        async_scheduling=False,
    )
    made = Contender(build_engine(config.resolve()).engine, threads, 1)
    made.begin(1, options.tokens, options.decodes + 2)
    return made


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The prompt, then decodes."""
    contenders = [
        contender(folder, size, threads, options) for size, threads in ((options.ranks, 1), (1, options.ranks))
    ]
    rows = []
    try:
        for case, count in (("prompt", -(-options.tokens // CHUNK)), ("decode", options.decodes)):
            pairs = []
            for turn in range(count):
                order = contenders if turn % 2 else contenders[::-1]
                took = {id(one): one.steps(1) for one in order}
                pairs.append([took[id(one)] for one in contenders])
            rows.append(_row(case, pairs, options.tokens))
        together, alone = contenders
        assert together.tokens == alone.tokens, "the ranks said something else"
    finally:
        for one in contenders:
            one.engine.close()
    return rows


def _row(case: str, pairs: list[list[tuple[float, float]]], tokens: int) -> dict[str, Any]:
    """Return a case, measured, and print it."""
    (ranks, ranks_work), (alone, alone_work) = (list(zip(*side, strict=True)) for side in zip(*pairs, strict=True))
    row: dict[str, Any] = {"case": case}
    for name, seconds in (("ranks", ranks), ("alone", alone)):
        if case == "prompt":
            row[f"{name}_tokens_per_second"] = round(tokens / sum(seconds), 1)
        else:
            row[f"{name}_ms"] = round(1000 * statistics.median(seconds), 2)
    row["speed"] = round(statistics.median(two / one for one, two in zip(ranks, alone, strict=True)), 3)
    row["best"] = round(min(alone) / min(ranks), 3)
    row["work"] = round(sum(alone_work) / sum(ranks_work), 3)
    print(*(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--decodes", type=int, default=24)
    parser.add_argument("--quantization", default="none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), {**QWEN3_0_6B, "num_hidden_layers": options.layers})
        print(json.dumps(measure(Path(folder), options)))


if __name__ == "__main__":
    main()
