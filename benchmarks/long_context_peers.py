"""Look for needles in a long context with each format of KV, beside llama.cpp's, in turns on the same cores.

    python benchmarks/long_context_peers.py [--context 8192] [--layers 4] [--rounds 3]

The weights are those of long_context.py, in Qwen3-0.6B's shape but for its depth; llama.cpp reads them from a GGUF file
of bfloat16. In a turn an engine computes a new text, and is then asked for the eight tokens behind each of four keys.
Engines take turns, the order turned round in every other round; shown are medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parents[1]))
from benchmarks.long_context import DEPTHS, NUM_VALUES, shape_of
from benchmarks.peers.environments import python_of
from tests.induction import haystack, make_induction_model

ENGINES = [
    *(("TokenMill", kv) for kv in ("auto", "int8", "int8-int4", "int4")),
    *(("llama.cpp", kv) for kv in ("f16", "q8_0", "q4_0")),
]


class Finder:
    """A process that finds needles, and what its turns took."""

    def __init__(self, engine: str, kv: str, model: Path, options: argparse.Namespace) -> None:
        self.engine, self.kv = engine, kv
        self.text_s: list[float] = []
        self.values_s: list[float] = []
        self.num_right = self.num_asked = 0
        python = python_of("llama-cpp" if engine == "llama.cpp" else "")
        sizes = [str(options.context), str(options.threads)]
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.adapters.needles", engine, kv, model, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def take_turn(self, text: list[int], needles: list[Any]) -> None:
        """Let it look, and note how long that took.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdin and self._process.stdout, "both are pipes"
        asked = {"text": text, "keys": [needle.key for needle in needles], "num_values": NUM_VALUES}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.engine} with {self.kv} has ended: {self._process.wait()}")
        told = json.loads(line)
        self.text_s.append(told["text_s"])
        self.values_s.append(told["values_s"])
        self.num_asked += len(needles)
        self.num_right += sum(
            values == list(needle.value) for needle, values in zip(needles, told["values"], strict=True)
        )

    def row(self, context: int) -> dict[str, Any]:
        """Return what it showed."""
        tokens = len(DEPTHS) * NUM_VALUES
        return {
            "engine": self.engine,
            "kv": self.kv,
            "text_tokens_per_second": round(context / statistics.median(self.text_s)),
            "milliseconds_per_value": round(1000 * statistics.median(self.values_s) / tokens, 2),
            "right": f"{self.num_right} of {self.num_asked}",
        }

    def end(self) -> None:
        """Let the process end."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Let them look, in turns, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    shape, rng = shape_of(options), np.random.default_rng()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, file = make_induction_model(Path(folder) / "model", shape, seed=1), Path(folder) / "model.gguf"
        convert = "import sys; from pathlib import Path; from benchmarks.peers.gguf_model import write_bf16 as write"
        command = [python_of("llama-cpp"), "-c", f"{convert}; write(Path(sys.argv[1]), Path(sys.argv[2]))"]
        subprocess.run([*command, checkpoint, file], check=True, cwd=ROOT)
        finders = [Finder(*own, file if own[0] == "llama.cpp" else checkpoint, options) for own in ENGINES]
        try:
            for number in range(options.rounds):
                text, needles = haystack(options.context, DEPTHS, rng, shape.vocab_size, NUM_VALUES)
                for finder in finders if number % 2 == 0 else reversed(finders):
                    finder.take_turn(text, needles)
        finally:
            for finder in finders:
                finder.end()
    rows = [finder.row(options.context) for finder in finders]
    print("| engine | KV | tokens/s of the text | ms for a token behind it | right |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print(json.dumps(vars(options) | {"load_averages": os.getloadavg(), "rows": rows}))


if __name__ == "__main__":
    main()
