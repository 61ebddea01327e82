"""Engines of many families and features on the fake GPU.

    python -m tests.engine.runner.fake_gpu_cases FOLDER [CASE ...]

A line of JSON for each case; `test_fake_gpu.py` says what may be in it. Without names some are drawn, all at night.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import _disable_current_modes

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.encoder_checkpoints import ENCODERS, make_encoder
from tests.engine.runner.fake_gpu import MODE, SEEN, WATCH, FakeGpu, FakeStaging
from tests.tiers import some
from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import StepPlan
from tokenmill.core.pooling import PoolingParams, PoolMode
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.runner.model_runner import EnteredStep, ModelRunner
from tokenmill.model.weights import loader
from tokenmill.startup.assembly import device_runners
from tokenmill.startup.assembly.setup import build_engine

NUM_DRAWN = 2
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
MOST_STEPS = 400


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


def requests(count: int = 7) -> list[AddRequest]:
    """Of all kinds and lengths, more than there are rows."""
    made = []
    for number in range(count):
        prompt = [(7 * number + place) % 200 for place in range(LENGTHS[number % len(LENGTHS)])]
        params = SamplingParams(max_tokens=6, ignore_eos=True, **KINDS[number % len(KINDS)])
        made.append(AddRequest(id=str(number), prompt_token_ids=prompt, params=params))
    return made


def _enter(runner: ModelRunner, plan: StepPlan, original: Callable[..., EnteredStep] = ModelRunner._enter) -> Any:
    # The host's own arithmetic, which needs its numbers.
    with _disable_current_modes():
        return original(runner, plan)


def run(model: Path, wanted: list[AddRequest], **options: Any) -> dict[str, Any]:
    """Run requests to their end twice, so that the second time finds prefixes; returns what was seen."""
    SEEN.reset()
    errors: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(device_runners, "Staging", FakeStaging))
        stack.enter_context(patch.object(loader, "_dummy", lambda decoder, like, report: decoder))
        stack.enter_context(patch.object(ModelRunner, "_enter", _enter))
        stack.enter_context(MODE)
        stack.enter_context(WATCH)
        config = EngineConfig(model=str(model), **{**SMALL, **options}).resolve()
        engine = build_engine(config, platform=FakeGpu()).engine
        with SEEN.during("step"):
            steps = 0
            for _ in range(2):
                for one in wanted:
                    engine.add(one)
                while engine.has_work and steps < MOST_STEPS:
                    errors += [output.error for output in engine.step() if output.error]
                    steps += 1
        has_graphs = engine.executor.runner.graphs is not None
        engine.close()
    return {**SEEN.told(), "steps": steps, "errors": sorted(set(errors)), "has_graphs": has_graphs}


def cases(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every case, by name."""

    def plain(family: str = "qwen3", **options: Any) -> Callable[[], dict[str, Any]]:
        count = 2 + options.get("max_num_seqs", 5)
        return lambda: run(make_checkpoint(folder / family, family, seed=0), requests(count), **options)

    def pooled(model: Path) -> dict[str, Any]:
        return run(model, texts(), max_model_len=62)

    made = {family: plain(family) for family in FAMILIES}
    made |= {family: partial(lambda name: pooled(make_encoder(folder / name, name)), family) for family in ENCODERS}
    drafts = {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4})}

    def drafted(draft: str = "qwen3", **options: Any) -> dict[str, Any]:
        model = make_checkpoint(folder / "qwen3", "qwen3", seed=0)
        chosen = {"method": "draft_model", "model": str(make_checkpoint(folder / draft, draft, seed=0))}
        speculation = json.dumps({**chosen, "num_speculative_tokens": 3})
        return run(model, requests(2 + options.get("max_num_seqs", 5)), speculative_config=speculation, **options)

    made |= {
        "draft model": drafted,
        "draft model with windows": partial(drafted, "mistral"),
        "draft model of experts, many rows": partial(drafted, "qwen3_moe", max_num_seqs=17),
        "draft model, eager": partial(drafted, enforce_eager=True),
        "embeddings of a decoder": lambda: pooled(make_checkpoint(folder / "qwen3", "qwen3", seed=0)),
        "drafts": plain(**drafts),
        "drafts and windows": plain("gemma3", **drafts),
        "windows keep their pages": plain("gemma3", disable_hybrid_kv_cache_manager=True),
        # Sixteen rows and one row are compiled for, where a number is an argument.
        "many rows": plain(max_num_seqs=17),
        "many recurrent rows": plain("qwen3_next", max_num_seqs=17),
        "eager": plain(enforce_eager=True),
        "fp8": plain(quantization="fp8"),
        # A step of the whole budget rounds its rows, others widen the weights.
        "fp8 experts": plain("qwen3_moe", quantization="fp8", max_num_seqs=17, max_num_batched_tokens=256),
        "invariant": plain(batch_invariant=True),
        "without overlap": plain(async_scheduling=False),
        "tiny pool": plain(num_pages=90, max_model_len=320),
        "no shared splits": plain(shared_splits=False),
        "float32": plain(dtype="float32"),
    }
    large = made["many rows"]

    def without_parts() -> dict[str, Any]:
        with patch.object(device_runners, "TWICE_READ_BYTES", 0):
            return large()

    return {**made, "large weights": without_parts}


def main() -> None:
    """Print a line for each case that is named, or else drawn."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    made = cases(folder)
    for name in names or some(list(made), NUM_DRAWN):
        try:
            found = made[name]()
        except Exception:
            found = {"failure": traceback.format_exc()[-3000:]}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
