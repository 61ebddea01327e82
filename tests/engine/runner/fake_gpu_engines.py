"""Run whole engines on the fake GPU, and tell what they were seen to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from tests.engine.runner.fake_gpu import MODE, SEEN, WATCH
from tests.engine.runner.fake_gpu_platform import FakeGpu, FakePages, FakeStaging
from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import StepPlan
from tokenmill.core.pooling import PoolingParams, PoolMode
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.runner.model_runner import EnteredStep, ModelRunner
from tokenmill.engine.transfer import device_pages
from tokenmill.model.weights import loader
from tokenmill.startup.assembly import device_runners
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.setup import build_engine

SMALL: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "max_model_len": 512, "page_size": 4}
SMALL |= {"num_pages": 900, "num_threads": 1, "device": "cpu", "async_scheduling": True, "attention_backend": "triton"}
SMALL |= {"load_format": "dummy", "dtype": "bfloat16"}
# Every kind of row that a step may have to sample for.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2},
    {"logit_bias": {3: 1.0}, "min_tokens": 3, "stop_token_ids": (7,)},
    {"allowed_token_ids": (1, 2, 3), "bad_word_ids": ((1, 2),)},
    {"temperature": 0.0, "logprobs": 0},
]
LENGTHS = (5, 1, 90, 20, 300)
MOST_STEPS, IDLE_SECONDS = 400, 0.002


def texts(count: int = 7) -> list[AddRequest]:
    """Texts to be pooled, in every way."""
    made = []
    for number in range(count):
        prompt = [(7 * number + place) % 200 for place in range(LENGTHS[number % 4] % 61)]
        pooling = PoolingParams(modes=tuple(PoolMode) if number % 2 else (PoolMode.MEAN,), second=number % 4)
        params = SamplingParams(max_tokens=1)
        text = AddRequest(id=str(number), prompt_token_ids=prompt, params=params, pooling=pooling, needs_no_output=True)
        made.append(text)
    return made


def requests(count: int = 7, lengths: Sequence[int] = LENGTHS) -> list[AddRequest]:
    """Of all kinds and lengths, more than there are rows."""
    made = []
    for number in range(count):
        prompt = [(7 * number + place) % 200 for place in range(lengths[number % len(lengths)])]
        params = SamplingParams(max_tokens=6, ignore_eos=True, **KINDS[number % len(KINDS)])
        made.append(AddRequest(id=str(number), prompt_token_ids=prompt, params=params))
    return made


def _enter(runner: ModelRunner, plan: StepPlan, original: Callable[..., EnteredStep] = ModelRunner._enter) -> Any:
    # The host's own arithmetic, which needs its numbers.
    with _disable_current_modes():
        return original(runner, plan)


def _attend(*parts: Any, **options: Any) -> Any:
    # The library's choice among its kernels knows no made-up device.
    return torch.ops.aten._scaled_dot_product_attention_math(*parts, **options)[0]


@contextmanager
def on_fake_gpu() -> Iterator[ExitStack]:
    """Let what runs inside take the fake GPU for a device, and read no weights."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(device_runners, "Staging", FakeStaging))
        stack.enter_context(patch.object(loader, "_dummy", lambda decoder, like, report: decoder))
        stack.enter_context(patch.object(ModelRunner, "_enter", _enter))
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", _attend))
        stack.enter_context(patch.object(device_pages, "DevicePages", FakePages))
        stack.enter_context(MODE)
        stack.enter_context(WATCH)
        yield stack


def run(
    model: Path,
    wanted: Sequence[AddRequest] | Callable[[Engine], Sequence[AddRequest]],
    begin: Callable[[], None] = lambda: None,
    **options: Any,
) -> dict[str, Any]:
    """Run requests to their end twice, so that the second time finds prefixes; returns what was seen.

    Args:
        wanted: the requests, or what makes them for an engine.
        begin: called when the engine has started.
    """
    SEEN.reset()
    errors: list[str] = []
    installed: list[str] = []
    with on_fake_gpu() as stack:
        stack.enter_context(patch.object(Assembly, "install", _noting(installed)))
        config = EngineConfig(model=str(model), **{**SMALL, **options}).resolve()
        engine = build_engine(config, platform=FakeGpu()).engine
        requests = wanted(engine) if callable(wanted) else wanted
        begin()
        with SEEN.during("step"):
            steps = 0
            for _ in range(2):
                for one in requests:
                    engine.add(one)
                while engine.has_work and steps < MOST_STEPS:
                    outputs = engine.step()
                    errors += [output.error for output in outputs if output.error]
                    steps += 1
                    if not outputs:
                        time.sleep(IDLE_SECONDS)  # what is loaded from other memory is waited for
        num_loaded = engine.stats().num_loaded_tokens
        engine.close()
    told = {"steps": steps, "errors": sorted(set(errors)), "has_graphs": bool(SEEN.captures), "capabilities": installed}
    told["num_loaded"] = num_loaded
    return {**SEEN.told(), **told}


def _noting(installed: list[str], original: Callable[..., None] = Assembly.install) -> Callable[..., None]:
    """Return `Assembly.install` that notes the names of what it has installed."""

    def install(assembly: Assembly, kinds: Sequence[type[Capability]]) -> None:
        original(assembly, kinds)
        installed[:] = [type(one).__name__ for one in assembly.capabilities]

    return install
