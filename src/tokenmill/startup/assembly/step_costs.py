"""Measure the time of steps by their number of tokens, before an engine serves: speculation weighs drafts by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tokenmill.core.messages import AddRequest
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.scheduler.drafter import Drafter

# Tokens of the steps that are measured: one, and as many drafts behind it as fill tiles of kernels, and a few more.
SIZES = (1, 2, 3, 5, 9, 17, 33)
# The least of so many is taken: what else a machine does only adds.
ROUNDS = 3


class SizedDrafter:
    """Drafts as many tokens as the next step to be measured has room for; they need not be right."""

    def __init__(self) -> None:
        self.size = 1

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[TokenArray]:
        """Return consecutive token ids that fill the step."""
        return [np.arange(self.size - num_tokens, dtype=np.int32)]

    def holds(self, request: Request, num_running: int) -> bool:
        """Never make a request wait for its launched steps."""
        return False

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Ignore the outcome of a draft."""

    def forget_request(self, request: Request) -> None:
        """Ignore the end of a request."""


def measure_step_costs(make_engine: Callable[[Drafter], Engine]) -> list[tuple[int, float]]:
    """Measure the seconds of steps of growing size: of one request, all of whose tokens are sampled.

    Args:
        make_engine: makes an engine of its own for the measurement, with this drafter.

    Returns:
        (tokens, seconds) of each size within the step budget and the context; empty if fewer than two sizes fit.
    """
    drafter = SizedDrafter()
    engine = make_engine(drafter)
    limits = engine.limits
    most = min(engine.scheduler.config.max_num_batched_tokens, limits.max_model_len - 3, limits.vocab_size)
    params = SamplingParams(max_tokens=most + 2, ignore_eos=True, temperature=0.0)
    costs: dict[int, float] = {}
    for _ in range(ROUNDS):
        for size in [size for size in SIZES if size <= most]:
            engine.add(AddRequest(id="measured", prompt_token_ids=[0], params=params))
            for drafter.size in (1, size):
                seconds = _run_step(engine, drafter.size)
            costs[size] = min(seconds, costs.get(size, seconds))
            engine.abort(["measured"])
    return sorted(costs.items()) if len(costs) > 1 else []


def _run_step(engine: Engine, size: int) -> float:
    """Schedule, run and commit a step of `size` tokens; returns its seconds."""
    started = time.perf_counter()
    plan = engine.scheduler.schedule()
    assert plan is not None, "one request, and nothing else to do"
    assert plan.num_tokens == size, f"a step of {plan.num_tokens} tokens instead of {size}"
    engine.scheduler.commit(engine.executor.launch(plan).result())
    return time.perf_counter() - started
