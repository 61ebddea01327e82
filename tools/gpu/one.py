"""One check or one model's measurements, in this process: a line of JSON for each result, as it comes.

    python -m tools.gpu.one machine
    python -m tools.gpu.one kernels
    python -m tools.gpu.one engine graphs-and-eager [--seed 7]
    python -m tools.gpu.one benchmark Qwen3-0.6B
    python -m tools.gpu.one transformers Qwen3-0.6B

`tools/gpu_check.py` runs them all, each in a process of its own. `--device cpu` is a tiny dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS = ("machine", "kernels", "engine", "benchmark", "transformers")


def main() -> int:
    """Run it; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("name", nargs="?", default="", help="of the engine's check, or of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and weights")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no new measurement begins")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(options, Path(folder)):
            print(json.dumps(row), flush=True)
            failed |= row.get("passed") is False
    return int(failed)


def rows_of(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The results of one call."""
    from tools.gpu.machine import make_platform

    if options.part == "kernels":
        from tools.gpu.kernel_checks import check_kernels

        yield from check_kernels(options.device)
        return
    platform = make_platform(options.device)
    if options.part == "machine":
        from tools.gpu.machine import describe

        yield describe(platform)
    elif options.part == "engine":
        yield check(platform, folder, options)
    else:
        from tools.gpu import benchmarks

        measure = benchmarks.measure_model if options.part == "benchmark" else benchmarks.measure_transformers
        yield from measure(options.name, platform, folder, time.monotonic() + options.seconds)


def check(platform: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One check of the engine: what it says, and how long it took."""
    from tools.gpu.engine_checks import checks_with

    start = time.monotonic()
    row = {"check": options.name}
    try:
        checks_with(options.name)(platform, folder, options.seed).work_of(options.name)()
    except Exception:
        return {**row, "passed": False, "detail": traceback.format_exc()[-4000:]}
    return {**row, "passed": True, "detail": f"{time.monotonic() - start:.1f} s"}


if __name__ == "__main__":
    sys.exit(main())
