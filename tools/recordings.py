"""Proves that a refactoring changed nothing: records what thousands of random requests bring, and compares.

    OMP_NUM_THREADS=1 OLD/.venv/bin/python tools/recordings.py record build/before
    OMP_NUM_THREADS=1 NEW/.venv/bin/python tools/recordings.py record build/after
    python tools/recordings.py compare build/before build/after

One file of JSON lines for each scenario: a header, a line per request (tokens, texts, exact logprobs, vectors), a line
per step (the plan and what was committed). The version of tokenmill that is recorded is the interpreter's. `compare`
names the first difference of each scenario; exit code 1: there is one. Scenarios with grammars, whose masks may be
late, have tokens and texts only. What runs on a GPU only (Triton kernels, the device's sampler) is not recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAME, DIFFERENT = 0, 1
Lines = list[dict[str, Any]]


def main() -> int:
    """Record or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write one file per scenario")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--seed", type=int, default=0, help="of scenarios, prompts and parameters")
    recording.add_argument("--requests", type=int, default=40, help="per scenario")
    comparing = commands.add_parser("compare", help="find the first difference of each scenario")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    for command in (recording, comparing):
        command.add_argument("--only", default="", help="only scenarios with this in their name")
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.first, options.second, options.only)
    record(options.folder, options.seed, options.requests, options.only)
    return SAME


def record(folder: Path, seed: int, num_requests: int, only: str) -> None:
    """Write `folder`/SCENARIO.jsonl for each scenario whose name contains `only`."""
    sys.path.insert(0, str(ROOT))
    from tools.recording.scenarios import scenarios

    import tokenmill

    print(f"recording {tokenmill.__file__}")
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    counts = {"scenarios": 0, "requests": 0, "steps": 0, "tokens": 0, "preemptions": 0}
    with tempfile.TemporaryDirectory() as scratch:
        for scenario in scenarios(seed):
            if only not in scenario.name:
                continue
            begun = time.monotonic()
            lines = _play(scenario, seed, num_requests, Path(scratch))
            text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
            (folder / f"{scenario.name}.jsonl").write_text(text + "\n", encoding="utf-8")
            found = _count(lines)
            counts = {name: count + found[name] for name, count in counts.items()}
            print(
                f"{scenario.name}: {found['requests']} requests, {found['steps']} steps, {found['tokens']} tokens, "
                f"{found['preemptions']} preemptions, {time.monotonic() - begun:.1f} s",
                flush=True,
            )
    print(json.dumps({**counts, "seconds": round(time.monotonic() - started, 1)}))


def _play(scenario: Any, seed: int, num_requests: int, scratch: Path) -> Lines:
    """The lines of a scenario's file."""
    from tools.recording.checkpoints import MODELS, digest
    from tools.recording.step_log import read_steps
    from tools.recording.traffic import Traffic

    from tokenmill import LLM

    folder, log = scratch / scenario.model, scratch / "steps"
    made = scratch / f"{scenario.model}.made"
    if not made.exists():
        made.write_text(str(MODELS[scenario.model](folder)))
    model = Path(made.read_text())
    options = scenario.options | {"step_log": str(log), "download_dir": str(scratch / "downloads")}
    with LLM(model, **options) as llm:
        header = {
            "scenario": scenario.name,
            "checkpoint": digest(model),
            "options": scenario.options,
            "kernels": llm.info.kernels,
            "attention": llm.info.attention_backend,
            "requests": num_requests,
        }
        requests = Traffic(llm, Random(f"{seed} {scenario.name} traffic"), scenario.grammars).run(num_requests)
    return [header, *requests, *([] if scenario.grammars else read_steps(log))]


def _count(lines: Lines) -> dict[str, int]:
    outputs = [output for line in lines for output in line.get("outputs", ())]
    admitted = [new["id"] for line in lines for new in line.get("new", ())]
    return {
        "scenarios": 1,
        "requests": sum("request" in line for line in lines),
        "steps": sum("step" in line for line in lines),
        "tokens": sum(len(output["token_ids"]) for output in outputs),
        "preemptions": len(admitted) - len(set(admitted)),
    }


def compare(first: Path, second: Path, only: str = "") -> int:
    """Print the first difference of each scenario, what was compared, and one line of JSON; returns the exit code.

    Args:
        only: of the scenarios with this in their name.
    """
    counts = {"scenarios": 0, "requests": 0, "steps": 0, "tokens": 0}
    differences = []
    paths = (path for folder in (first, second) for path in folder.glob("*.jsonl"))
    names = sorted({path.name for path in paths if only in path.stem})
    for name in names:
        if not (first / name).exists() or not (second / name).exists():
            differences.append(f"{name}: only in {first if (first / name).exists() else second}")
            continue
        one, other = (_read(folder / name) for folder in (first, second))
        found = _count(one)
        counts = {name: count + found[name] for name, count in counts.items()}
        difference = _first_difference(one, other)
        if difference is not None:
            differences.append(f"{name}: {difference}")
    print(*differences, sep="\n", end="\n" if differences else "")
    amounts = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{len(differences)} of {len(names)} scenarios differ; compared: {amounts}")
    print(json.dumps({**counts, "different": len(differences)}))
    return DIFFERENT if differences or not names else SAME


def _read(path: Path) -> Lines:
    with path.open(encoding="utf-8") as file:  # splitlines() would split at what a text holds, U+0085 for instance
        return [json.loads(line) for line in file]


def _first_difference(one: Any, other: Any, place: str = "") -> str | None:
    """Return where two values first differ, and how; None: they are equal."""
    if one == other:
        return None
    difference = f"{_short(one)} became {_short(other)}"
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(key, one[key], other[key]) for key in one if key in other]
        difference = f"only one of them has {', '.join(sorted(one.keys() ^ other.keys()))}"
    elif isinstance(one, list) and isinstance(other, list):
        pairs = [(_label(a, index), a, b) for index, (a, b) in enumerate(zip(one, other, strict=False))]
        difference = f"{len(one)} entries became {len(other)}"
    inner = (_first_difference(a, b, f"{place} {label}") for label, a, b in pairs)
    return next((found for found in inner if found is not None), f"{place.strip() or 'the file'}: {difference}")


def _label(item: Any, index: int) -> str:
    """A line of a file by its number of request or step, anything else by its index."""
    kinds = [kind for kind in ("request", "step") if isinstance(item, dict) and kind in item]
    return f"{kinds[0]} {item[kinds[0]]}:" if kinds else str(index)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."


if __name__ == "__main__":
    sys.exit(main())
