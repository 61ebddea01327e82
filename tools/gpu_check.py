"""Proves the GPU side wherever a GPU is at hand, and measures it: `make gpu`, or

    python tools/gpu_check.py [--part machine|kernels|engine|benchmarks] [--out build/gpu] [--seconds 540]

Prints the machine, then tests the kernels, the engine and the speed, each part alone or all of them, and writes
gpu_check.json and gpu_check.md. Exit code 0: all passed; 1: something failed; 3: there is no GPU. With `--device cpu`
every part runs tiny and interpreted, to show that this script works; its figures then mean nothing.

Needs torch, triton, numpy and the wheels of msgspec, safetensors, tokenizers and pytest (which needs pluggy, iniconfig
and packaging), and none of the server's packages.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("machine", "kernels", "engine", "benchmarks")
PASSED, FAILED, NO_GPU = 0, 1, 3
# What each part may take of the time, one after the other; what a part leaves over is the next ones'.
SHARES = {"machine": 0.1, "kernels": 0.4, "engine": 0.65, "benchmarks": 1.0}


def main() -> int:
    """Run the parts; returns the exit code."""
    options = parse()
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    from tools.gpu.machine import make_platform
    from tools.gpu.report import markdown, write_report

    from tokenmill.core.errors import InvalidConfig

    try:
        platform = make_platform(options.device)
    except InvalidConfig as error:
        print(f"no GPU to check: {error}", file=sys.stderr)
        return NO_GPU
    with tempfile.TemporaryDirectory() as folder:
        found = run(options, platform, Path(folder))
    print(markdown(found))
    paths = write_report(Path(options.out), found)
    print(f"written to {paths[0]} and {paths[1]}; {found['seconds']:.0f} s in all")
    return FAILED if has_failed(found) else PASSED


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="check and measure the engine on a GPU")
    parser.add_argument("--part", action="append", choices=PARTS, help="this part only; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny dry run")
    parser.add_argument("--out", default="build/gpu", help="folder of the report")
    parser.add_argument("--seconds", type=float, default=540.0, help="when to stop beginning new checks")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of prompts and weights")
    return parser.parse_args()


def run(options: argparse.Namespace, platform: Any, folder: Path) -> dict[str, Any]:
    """What the chosen parts found."""
    from tools.gpu.benchmarks import Rates, run_benchmarks
    from tools.gpu.engine_checks import check_engine
    from tools.gpu.kernel_checks import check_kernels
    from tools.gpu.machine import copy_rate, describe, matmul_rate

    start = time.monotonic()
    parts = options.part or PARTS
    found: dict[str, Any] = {"is_dry": options.device == "cpu", "seed": options.seed}
    found["machine"] = describe(platform)
    print(*(f"{name}: {value}" for name, value in found["machine"].items()), f"seed: {options.seed}", sep="\n")

    def until(part: str) -> float:
        return start + SHARES[part] * options.seconds

    if {"machine", "benchmarks"} & set(parts):
        rates = Rates(copy_rate(platform), matmul_rate(platform))
        found["machine"] |= {"copy_gb_per_s": rates.copy_bytes / 1e9, "matmul_tflops": rates.operations / 1e12}
    if "kernels" in parts:
        found["kernels"] = check_kernels(options.device, until("kernels") - time.monotonic())
    if "engine" in parts:
        found["engine"] = check_engine(platform, folder, options.seed, until("engine"))
    if "benchmarks" in parts:
        found["benchmarks"] = run_benchmarks(platform, folder, rates, until("benchmarks"))
    found["seconds"] = time.monotonic() - start
    return found


def has_failed(found: dict[str, Any]) -> bool:
    """Whether a check failed, or a measurement could not be made."""
    checks = [row for part in ("kernels", "engine") for row in found.get(part, [])]
    return any(row["passed"] is False for row in checks) or any("failed" in row for row in found.get("benchmarks", []))


if __name__ == "__main__":
    sys.exit(main())
