"""Measure the processor time of Python in a step, beside that of the native code that it calls.

    python benchmarks/steps.py [--rows 1 64] [--steps 200] [--rounds 3]

An engine in this process decodes with the demo model on one thread: greedy, drawn, and with log probabilities. Every
call of the native module is timed where it is called; the rest of the engine's step is Python, NumPy and these clocks.
Prints medians and tenth percentiles of steps that only decode, of all rounds; JSON last.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from tokenmill import _native
from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.engine.loop.engine import Engine
from tokenmill.startup.assembly.setup import build_engine

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
WARM_UP = 20


class NativeClock:
    """Adds up the processor seconds of this thread within the methods of a module's classes.

    Attributes:
        seconds: of all calls since it was last set. calls: their number.
    """

    def __init__(self, module: Any) -> None:
        self.seconds = 0.0
        self.calls = 0
        for owner in vars(module).values():
            if isinstance(owner, type):
                for name in [name for name in vars(owner) if not name.startswith("_")]:
                    if callable(method := getattr(owner, name)):
                        setattr(owner, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.thread_time() - started
                self.calls += 1

        return timed


def main() -> None:
    """Measure each kind of sampling with each number of rows, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=200, help="measured in a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    clock = NativeClock(_native)
    length = WARM_UP + args.steps + 8
    config = EngineConfig(
        model=str(demo_model_path()), num_threads=1, max_num_seqs=max(args.rows), max_model_len=length + 8
    )
    found: dict[str, dict[str, float]] = {}
    spent: dict[str, list[tuple[float, float, int]]] = {}
    built = build_engine(config)
    for _ in range(args.rounds):
        for rows in args.rows:
            for kind in KINDS:
                spent.setdefault(f"{kind} {rows}", []).extend(_decode(built.engine, clock, rows, kind, args.steps))
    for name, steps in spent.items():
        python = sorted(1e3 * own for own, _, _ in steps)
        found[name] = {
            "python_ms": round(statistics.median(python), 3),
            "python_p10_ms": round(python[len(python) // 10], 3),
            "native_ms": round(statistics.median(1e3 * native for _, native, _ in steps), 3),
            "native_calls": statistics.median(calls for _, _, calls in steps),
        }
        print(f"{name:<14}", *(f"{key} {value:g}" for key, value in found[name].items()))
    built.engine.close()
    print(json.dumps({"steps": args.steps, "rounds": args.rounds, "found": found}))


def _decode(engine: Engine, clock: NativeClock, rows: int, kind: str, steps: int) -> list[tuple[float, float, int]]:
    """Return the processor seconds of Python and of native code, and the native calls, of each step."""
    names = [f"{kind}-{number}" for number in range(rows)]
    for number, name in enumerate(names):
        params = SamplingParams(max_tokens=WARM_UP + steps + 4, ignore_eos=True, seed=number, **KINDS[kind])
        engine.add(AddRequest(id=name, prompt_token_ids=[5 + number, 6, 7], params=params))
    for _ in range(WARM_UP):
        engine.step()
    found = []
    for _ in range(steps):
        clock.seconds, clock.calls = 0.0, 0
        started = time.thread_time()
        engine.step()
        found.append((time.thread_time() - started - clock.seconds, clock.seconds, clock.calls))
    engine.abort(names)
    return found


if __name__ == "__main__":
    main()
