"""Needles in a context of 131,072 tokens, computed in chunks and then found on the disk after kill -9 and a start.

    python benchmarks/long_context.py [--context 131072] [--layers 28] [--kv-cache-dtype int8] [--folder DIR]

Weights that retrieve (tests/induction.py) in Qwen3-0.6B's shape, but for its vocabulary and, with `--layers`, its
depth: the work per token and the bytes of KV of a layer are real. A text with needles at four depths is run in chunks,
and each key asked for its value of eight tokens. Then the process is killed, and one that starts again answers from the
disk, whose files were dropped from the page cache: seconds to the first token, against the bytes of KV and what reading
the same files takes. The last line is one JSON document. The right values are the test: exit status 1 without them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.induction import InductionShape, Needle, haystack, make_induction_model

from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.transfer.state import TransferState
from tokenmill.startup.assembly.setup import build_engine

DEPTHS = [0.0, 1 / 3, 2 / 3, 1.0]
NUM_VALUES = 8
READ_BYTES = 1 << 20


def main() -> None:
    """Compute, kill, start again, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=2048, help="most tokens of a step")
    parser.add_argument("--folder", default=None, help="where the tier is; its files are removed")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(answer(options)), flush=True)
        time.sleep(600)  # to be killed
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=options.folder) as tier:
        options.model, options.folder = str(make_induction_model(Path(folder), shape_of(options), seed=1)), tier
        computed = run(options, "computed")
        disk_rate = read_rate(Path(tier), computed["kv_bytes"])
        restored = run(options, "restored")
    rate = computed["kv_bytes"] / restored["first_token_s"] / 1e9
    found = {
        "context": options.context,
        "layers": options.layers,
        "kv_cache_dtype": options.kv_cache_dtype,
        "computed": computed,
        "restored": restored,
        "disk_gb_per_s": round(disk_rate, 2),
        "restored_gb_per_s": round(rate, 2),
    }
    print(json.dumps(found))
    if not computed["right"] == restored["right"] == len(DEPTHS):
        raise SystemExit("some values were not those of the text")


def shape_of(options: argparse.Namespace) -> InductionShape:
    """Return Qwen3-0.6B's shape, with room for the question and the answer."""
    return InductionShape(
        max_position=options.context + 64,
        hidden_size=1024,
        num_layers=options.layers,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=3072,
    )


def run(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Run one part in a process of its own, and kill that as soon as it has spoken."""
    command = [sys.executable, __file__, "--part", part]
    for name in ("context", "layers", "kv_cache_dtype", "page_size", "chunk", "folder", "model"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found: dict[str, Any] = json.loads(process.stdout.readline())
        finally:
            process.kill()
    print(part, found, file=sys.stderr)
    return found


def read_rate(tier: Path, num_bytes: int) -> float:
    """Write the tier's pages to the disk, drop them from the page cache, and return the GB/s at which they are read.

    They lie at the front of a file that has room for more.
    """
    (path,) = tier.rglob("*.pages")
    drop(path)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.tell() < num_bytes:
            file.read(READ_BYTES)
    rate = num_bytes / (time.perf_counter() - began) / 1e9
    drop(path)
    return rate


def drop(path: Path) -> None:
    """Write a file out, and drop it from the page cache."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(options: argparse.Namespace) -> Engine:
    """Return an engine whose KV memory holds the context, and some more."""
    config = EngineConfig(
        model=options.model,
        device="cpu",
        max_num_seqs=1,
        max_model_len=options.context + 32,
        max_num_batched_tokens=options.chunk,
        kv_cache_dtype=options.kv_cache_dtype,
        page_size=options.page_size,
        num_pages=options.context // options.page_size + 64,
        kv_disk=options.folder,
        kv_disk_size=32 << 30,
    )
    built = build_engine(config.resolve())
    for _ in built.idle_work:
        pass  # the memory of KV is taken, as by a server that nobody has asked yet
    return built.engine


def answer(options: argparse.Namespace) -> dict[str, Any]:
    """Ask each key for its value, the same text before it; wait until all of it is stored."""
    rng = np.random.default_rng(5)
    text, needles = haystack(options.context, DEPTHS, rng, shape_of(options).vocab_size, NUM_VALUES)
    engine, seconds, num_right, tokens = start(options), [], 0, []
    for needle in needles:
        first, values, num_cached = ask(engine, text, needle)
        num_right += values == needle.value
        seconds.append(round(first, 2))
        tokens.append(num_cached)
    transfers = engine.scheduler.resource(TransferState)
    assert transfers is not None, "an engine with a tier"
    while transfers.is_busy:
        engine.step()
    files = Path(options.folder).rglob("*.pages")
    return {
        "right": num_right,
        "first_token_s": seconds[0],
        "next_first_tokens_s": seconds[1:],
        "cached_tokens": tokens,
        "kv_bytes": sum(path.stat().st_blocks * 512 for path in files),
    }


def ask(engine: Engine, text: list[int], needle: Needle) -> tuple[float, list[int], int]:
    """Return the seconds to the first token, the value, and the tokens of the prompt that were not run."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_VALUES)
    began, first, num_cached = time.perf_counter(), 0.0, 0
    engine.add(AddRequest(id=str(needle.key), prompt_token_ids=[*text, needle.key], params=params))
    values: list[int] = []
    while len(values) < NUM_VALUES:
        for output in engine.step():
            first = first or time.perf_counter() - began
            num_cached = max(num_cached, output.num_cached_tokens)
            values += output.token_ids
    return first, values, num_cached


if __name__ == "__main__":
    main()
