"""The whole engine on the device: the oracle's tokens, and the same tokens in every mode."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tools.gpu.engines import generate, outputs, running
from tools.gpu.feature_checks import FEATURES, FeatureChecks, feature_names
from tools.gpu.folders import SMALL, TINY, write_checkpoint
from tools.gpu.model_checks import MODELS, ModelChecks, model_names

from tokenmill.core.sampling_params import SamplingParams

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "page_size": 16, "num_pages": 200}


# Greedy tokens of a family equal those of the CPU reference.
ORACLE = "oracle-"
# The host waits for the results of steps and for nothing else.
NO_WAITS = "no-waits-but-for-results"
RECURRENT = ("lfm2", "qwen3_5")
# Whose random checkpoints transformers writes, where it is installed: fused projections, norms behind blocks, an
# activation without a gate, states that recur. Those with windows, and those of features, have checks of their own.
WRITTEN_BY_TRANSFORMERS = ("phi3", "olmo2", "arcee", *RECURRENT, "qwen3_5_moe")


def check_names(is_dry: bool) -> list[str]:
    """Return the checks, the most telling first; a dry run has time for three."""
    small = [f"{ORACLE}qwen3", "graphs-and-eager", "preemption-under-a-tiny-pool"]
    if is_dry:
        return small
    ranks = ["two-gpus", "two-gpus-one-shot", "two-stages", "two-gpus-one-context", "two-gpus-one-draft-model"]
    ranks = ranks if torch.cuda.device_count() > 1 else []
    theirs, written = [], []
    if importlib.util.find_spec("transformers") is not None:
        theirs, written = ["equals-transformers"], [*WRITTEN_BY_TRANSFORMERS]
    in_features = {"qwen3", *RECURRENT}
    families = [f"{ORACLE}{family}" for family in [*SMALL, *written] if family not in in_features]
    modes = ["overlap-or-not", NO_WAITS, *(f"{NO_WAITS}-{family}" for family in RECURRENT if family in written)]
    return [*small, *ranks, *modes, *model_names(), *feature_names(), *families, *theirs, "batch-invariant"]


def checks_with(name: str) -> type[EngineChecks | FeatureChecks | ModelChecks]:
    """Return the class that has a check."""
    if name in MODELS:
        return ModelChecks
    return FeatureChecks if name in FEATURES else EngineChecks


class EngineChecks:
    """The checks, by name; each raises AssertionError with what differed.

    Args:
        seed: of prompts and weights; the report tells it.
    """

    def __init__(self, platform: Any, folder: Path, seed: int) -> None:
        self._platform = platform
        self._folder = folder
        self._seed = seed
        self._is_dry = platform.name != "cuda"
        self._num_tokens = 2 if self._is_dry else 32
        self._limits = {**LIMITS, "max_num_seqs": 2, "num_pages": 40} if self._is_dry else LIMITS
        generator = random.Random(seed)
        lengths = (1, 9) if self._is_dry else (1, 20, 90, 150, 33, 7, 64, 128)
        self._prompts = [[generator.randrange(1, 250) for _ in range(length)] for length in lengths]

    def work_of(self, name: str) -> Callable[[], None]:
        """Return the work of one of `check_names`.

        Raises:
            AttributeError: there is no such check.
        """
        if name.startswith(ORACLE):
            return partial(self._oracle, name.removeprefix(ORACLE))
        if name.startswith(NO_WAITS):
            return partial(self._no_waits, name.removeprefix(NO_WAITS).removeprefix("-") or "qwen3")
        work: Callable[[], None] = getattr(self, f"_{name.replace('-', '_')}")
        return work

    def _checkpoint(self, family: str) -> Path:
        if family in WRITTEN_BY_TRANSFORMERS:
            from tests.checkpoints import make_checkpoint

            return make_checkpoint(self._folder / family, family, seed=self._seed)
        shape = TINY if self._is_dry else SMALL[family]
        return write_checkpoint(self._folder / family, shape, self._seed)

    def _params(self, **how: Any) -> list[SamplingParams]:
        how = {"temperature": 0.0, "max_tokens": self._num_tokens, "ignore_eos": True, **how}
        return [SamplingParams(**how) for _ in self._prompts]

    def _tokens(self, model: Path, platform: Any, **options: Any) -> list[list[int]]:
        with running(model, platform, **{**self._limits, "dtype": "float32", **options}) as engine:
            return generate(engine, self._prompts, self._params())

    def _oracle(self, family: str) -> None:
        model = self._checkpoint(family)
        want = self._tokens(model, None)
        _assert_same(self._tokens(model, self._platform), want)

    def _equals_transformers(self) -> None:
        from transformers import AutoModelForCausalLM

        model = self._checkpoint("qwen3")
        oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        want = []
        for prompt in self._prompts:
            ids = torch.tensor([prompt])
            answer = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self._num_tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            want.append(answer[0, len(prompt) :].tolist())
        _assert_same(self._tokens(model, self._platform), want)

    def _graphs_and_eager(self) -> None:
        self._same({}, {"enforce_eager": True})

    def _overlap_or_not(self) -> None:
        self._same({"async_scheduling": True}, {"async_scheduling": False})

    def _two_gpus(self) -> None:
        self._same({"tensor_parallel_size": 2}, {})

    def _two_gpus_one_shot(self) -> None:
        # In graphs and eager; and alone or not, where nothing depends on a step's size.
        for options in ({}, {"enforce_eager": True}):
            self._same({"tensor_parallel_size": 2, "all_reduce": "one-shot", **options}, options)
        invariant = {"tensor_parallel_size": 2, "all_reduce": "one-shot", "batch_invariant": True}
        self._same(invariant, {**invariant, "max_num_seqs": 1})

    def _two_stages(self) -> None:
        # Overlapped or not, in graphs or eager: the same layers in the same order.
        for options in ({}, {"enforce_eager": True}):
            self._same({"pipeline_parallel_size": 2, **options}, options)

    def _two_gpus_one_context(self) -> None:
        """To the bit, with log probabilities: contexts of up to 18 pages, each of which lies on one of the two."""
        shape = {**SMALL["qwen3"], "max_position_embeddings": 8192}
        model, generator = write_checkpoint(self._folder / "long", shape, self._seed), random.Random(self._seed)
        begin = [generator.randrange(1, 250) for _ in range(512)]
        # None ends a page with its output: one GPU would begin inside that page the next time, where ranks do not.
        prompts = [begin + [generator.randrange(1, 250) for _ in range(more)] for more in (1, 120, 4100, 60)]
        params = [SamplingParams(temperature=0.7, seed=one, max_tokens=32, logprobs=3) for one in range(len(prompts))]
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 600, "max_model_len": 5120, "page_size": 256}
        options |= {"num_pages": 24, "dtype": "float32", "attention_backend": "triton", "enforce_eager": True}
        told = []
        for size in (1, 2):
            with running(model, self._platform, **options, context_parallel_size=size) as engine:
                told.append([outputs(engine, prompts, params) for _ in range(2)])
        for ran, (ours, theirs) in enumerate(zip(*told, strict=True)):
            for number, (one, two) in enumerate(zip(theirs, ours, strict=True)):
                pairs = [(output.token_ids, output.logprobs) for output in one]
                same = [(output.token_ids, output.logprobs) for output in two]
                assert pairs == same, f"request {number}, run {ran}: {pairs}, not {same}"

    def _two_gpus_one_draft_model(self) -> None:
        """Its own model, so that what it drafts is right."""
        from tests.engine.runner.test_draft_model import Holding

        model, ours = self._checkpoint("qwen3"), Holding()
        chosen = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 3})
        options = {**self._limits, "dtype": "float32", "tensor_parallel_size": 2, "speculative_config": chosen}
        with running(model, self._platform, **options, async_scheduling=True) as engine:
            engine.scheduler.state.drafters = (ours,)
            got = generate(engine, self._prompts, self._params())
        _assert_same(got, self._tokens(model, self._platform))
        assert ours.acceptance > 0.9, f"only {ours.acceptance:.0%} of its own drafts are right"

    def _same(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        model = self._checkpoint("qwen3")
        _assert_same(self._tokens(model, self._platform, **one), self._tokens(model, self._platform, **other))

    def _preemption_under_a_tiny_pool(self) -> None:
        model = self._checkpoint("qwen3")
        longest = max(map(len, self._prompts)) + self._num_tokens
        tight = {"page_size": 8, "num_pages": -(-longest // 8) + 1, "max_model_len": longest}
        with running(model, self._platform, **{**self._limits, "dtype": "float32", **tight}) as engine:
            got = generate(engine, self._prompts, self._params())
            assert self._is_dry or engine.stats().num_preemptions > 0, "nothing was preempted"
        _assert_same(got, self._tokens(model, None))

    def _no_waits(self, family: str) -> None:
        model = self._checkpoint(family)
        with running(model, self._platform, **self._limits, async_scheduling=True) as engine:
            generate(engine, self._prompts, self._params(temperature=0.7, top_p=0.9))
            torch.cuda.set_sync_debug_mode("error")
            try:
                generate(engine, self._prompts, self._params(temperature=0.7, top_p=0.9))
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _batch_invariant(self) -> None:
        model = self._checkpoint("qwen3")
        options = {**self._limits, "dtype": "bfloat16", "batch_invariant": True}
        params = self._params(temperature=0.8, seed=5)
        with running(model, self._platform, **options) as engine:
            together = generate(engine, self._prompts, params)
            for number, prompt in enumerate(self._prompts):
                engine.reset_prefix_cache()
                alone = generate(engine, [prompt], params[:1])
                _assert_same(alone, together[number : number + 1])


def _assert_same(got: list[list[int]], want: list[list[int]]) -> None:
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours == theirs, f"request {number}: {ours}, not {theirs}"
