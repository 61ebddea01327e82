"""Proves the GPU side wherever a GPU is at hand, and measures it: `make gpu`, or

    python tools/gpu_check.py [--part machine|kernels|engine|benchmarks] [--out build/gpu] [--seconds 540]

Looks at the machine, then tests the kernels, the engine and the speed, each part alone or all of them. Every check and
every model runs in a process of its own (`tools/gpu/one.py`), with its own deadline. Results are printed, and appended
to results.jsonl, as they come; gpu_check.json and gpu_check.md tell them all at the end. Exit code 0: all passed; 1:
something failed; 3: there is no GPU. With `--device cpu` every part runs tiny and interpreted, to show that this works;
its figures then mean nothing.

Needs torch, triton, numpy and the wheels of msgspec, safetensors, tokenizers and pytest (which needs pluggy, iniconfig
and packaging), and none of the server's packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("machine", "kernels", "engine", "benchmarks")
PASSED, FAILED, NO_GPU = 0, 1, 3
# Checks of the engine are small: a GPU takes several at a time.
ENGINES_AT_A_TIME = {"cuda": 12, "cpu": 2}


def main() -> int:
    """Run the parts; returns the exit code."""
    options = parse()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    from tools.gpu.jobs import run_jobs
    from tools.gpu.report import Results

    from tokenmill.platform import cuda

    if options.device == "cuda" and not cuda.is_available():
        print("no GPU to check: torch finds none that it can use", file=sys.stderr)
        return NO_GPU
    start = time.monotonic()
    results = Results(Path(options.out), options.device == "cpu", options.seed)
    for part in options.part or PARTS:
        width = ENGINES_AT_A_TIME[options.device] if part == "engine" else 1
        run_jobs(jobs(part, options), width, start + options.seconds, results.record)
    print(results.finish(time.monotonic() - start))
    return FAILED if results.has_failed else PASSED


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="check and measure the engine on a GPU")
    parser.add_argument("--part", action="append", choices=PARTS, help="this part only; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny dry run")
    parser.add_argument("--out", default="build/gpu", help="folder of the report")
    parser.add_argument("--seconds", type=float, default=540.0, help="when everything ends, done or not")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of prompts and weights")
    return parser.parse_args()


def jobs(part: str, options: argparse.Namespace) -> list[Any]:
    """The calls of `tools/gpu/one.py` that make up a part, and how long each may take."""
    from tools.gpu.benchmarks import model_names
    from tools.gpu.engine_checks import check_names
    from tools.gpu.jobs import Job

    common = ("--device", options.device, "--seed", str(options.seed))
    is_dry = options.device == "cpu"
    if part == "machine":
        return [Job(part, ("machine", *common), 60)]
    if part == "kernels":
        return [Job(part, ("kernels", *common), 300)]
    if part == "engine":
        return [Job(part, ("engine", name, *common), 240) for name in check_names(is_dry)]
    models = [Job(part, ("benchmark", name, *common, "--seconds", "300"), 330) for name in model_names(is_dry)]
    if is_dry or importlib.util.find_spec("transformers") is None:
        return models
    return [*models, Job(part, ("transformers", model_names(is_dry)[0], *common, "--seconds", "100"), 130)]


if __name__ == "__main__":
    sys.exit(main())
