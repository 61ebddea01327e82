"""Measure the cost of a verify step: decodes of 1 + k rows, whose drafts are all wrong, against decodes of one row.

    python benchmarks/verify.py [--quantization none,int8,int4] [--requests 1,8] [--contexts 512,4096] [--turns 5]
                                [--one-core]

Qwen3-0.6B's shape with random weights, on the CPU. Prompts are not computed: the KV memory has random numbers. Steps of
every number of rows are measured in turns in one process; medians with quartiles, in milliseconds. `attention` is
called once more after its step, by itself, over all layers; `linears` are the rest of the pass, so the norms are among
them; `sampling` has the output head and the draws. With --one-core they are milliseconds of one core, which count only
while the thread runs: for a machine that others use as well. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.gpu.folders import QWEN3_0_6B, write_config

from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.startup.assembly.loading import LoadedModel
from tokenmill.startup.assembly.setup import build_engine

MAX_TOKENS = 400


class WrongDrafts:
    """Drafts `number` tokens that random weights will hardly draw."""

    number = 0

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[TokenArray]:
        """See `Drafter`."""
        return [np.zeros(min(self.number, limit), dtype=np.int32) for limit in limits]

    def holds(self, request: Request, num_running: int) -> bool:
        """See `Drafter`."""
        return True

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See `Drafter`."""

    def forget_request(self, request: Request) -> None:
        """See `Drafter`."""


class TimedParts:
    """Stands between a runner and its model and sampler: notes seconds, or skips the pass."""

    def __init__(self, engine: Engine, model: LoadedModel, clock: Callable[[], float]) -> None:
        self.clock = clock
        runner: Any = engine.executor.runner  # type: ignore[attr-defined]
        self.seconds: dict[str, float] = {}
        self.is_skipping = True
        self._model, self._attention, self._sample = runner.model, runner._attention, runner._sampler.sample
        self._layers = [layer.attention.layer for layer in model.decoder.layers]
        self._hidden_size = model.architecture.hidden_size
        self._batch: ForwardBatch | None = None
        for memory in self._attention.kv.tensors:
            tensor_over(memory).random_(-9, 9)
        runner.model, runner._sampler.sample = self, self.sample

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        began = self.clock()
        result = call()
        self.seconds[name] = self.clock() - began
        return result

    def forward(self, batch: ForwardBatch, attention: Any) -> torch.Tensor:
        """See `Model.forward`."""
        self._batch = batch
        if self.is_skipping:
            return torch.zeros(len(batch.output_indices), self._hidden_size, dtype=torch.bfloat16)
        return self._timed("pass", lambda: self._model.forward(batch, attention))

    def sample(self, *arguments: Any) -> Any:
        """See `StepSampler.sample`."""
        return self._timed("sampling", lambda: self._sample(*arguments))

    def attend_again(self) -> float:
        """Seconds of the last step's attention in all layers."""
        assert self._batch is not None, "a step has run"
        spec, plan = self._attention.spec, self._attention.plan(self._batch)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv = torch.randn(len(self._batch.token_ids), heads * spec.head_dim).bfloat16()
        began = self.clock()
        for layer in self._layers:
            self._attention.forward(qkv, layer, plan)
        return self.clock() - began


def measure(model: LoadedModel | None, folder: Path, case: dict[str, Any], options: argparse.Namespace):
    """The rows of one case, and the model for the next."""
    requests, context = case["requests"], case["context"]
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        load_format="dummy",
        max_num_seqs=requests,
        max_model_len=context + MAX_TOKENS,
        quantization=case["quantization"],
        num_pages=requests * ((context + MAX_TOKENS) // 16 + 2) + 2,
        enable_prefix_caching=False,
        num_threads=1 if options.one_core else None,
    )
    built = build_engine(config.resolve(), model=model)
    engine, drafter = built.engine, WrongDrafts()
    parts = TimedParts(engine, built.model, time.thread_time if options.one_core else time.perf_counter)
    engine.scheduler.state.drafters = (drafter,)
    params = SamplingParams(temperature=options.temperature, ignore_eos=True, max_tokens=MAX_TOKENS)
    for number in range(requests):
        engine.add(AddRequest(id=str(number), prompt_token_ids=[1 + number] * (context - 1), params=params))
    while len(engine.step()) < requests:
        pass
    parts.is_skipping = False
    found: dict[int, list[dict[str, float]]] = {int(rows): [] for rows in options.rows.split(",")}
    for turn in range(options.turns + 1):
        for rows, times in found.items():
            drafter.number = rows - 1
            began = parts.clock()
            engine.step()
            whole, attention = parts.clock() - began, parts.attend_again()
            linears, sampling = parts.seconds["pass"] - attention, parts.seconds["sampling"]
            if turn:  # the first is not counted
                times.append({"step": whole, "attention": attention, "linears": linears, "sampling": sampling})
    engine.close()
    return [{**case, "rows": rows, **summary(times, found[1])} for rows, times in found.items()], built.model


def summary(times: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, Any]:
    """Quartiles of each part, and how many plain steps the step takes the time of."""
    quartiles = {
        name: [round(1e3 * value, 1) for value in statistics.quantiles([one[name] for one in times])]
        for name in times[0]
    }
    ratio = statistics.median(one["step"] for one in times) / statistics.median(one["step"] for one in plain)
    return {"ms": quartiles, "ratio": round(ratio, 2)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quantization", default="none,int8,int4")
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--contexts", default="512,4096")
    parser.add_argument("--rows", default="1,2,3,5,9,17", help="of each request; 1 has to be among them")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.6, help="0: the largest logit, without the others")
    parser.add_argument("--one-core", action="store_true", help="one thread, by the time that it ran")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name), QWEN3_0_6B)
        for quantization in options.quantization.split(","):
            model: LoadedModel | None = None
            for requests in map(int, options.requests.split(",")):
                for context in map(int, options.contexts.split(",")):
                    case = {"quantization": quantization, "requests": requests, "context": context}
                    rows, model = measure(model, folder, case, options)
                    for row in rows:
                        print(json.dumps(row), file=sys.stderr)
                    results += rows
    print(json.dumps({"benchmark": "verify", **vars(options), "results": results}))


if __name__ == "__main__":
    main()
