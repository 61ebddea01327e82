"""Drafts change nothing but the number of steps: tokens, log probabilities and ends keep every bit (native kernels).

The drafter knows what will come, and lies: some drafts are right to the end, some wrong at once, some in the middle.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_not_numbers import POISON, poisoned, run, running
from tests.engine.runner.told import assert_same, told
from tests.engine.scheduler.drafters import KnowingDrafter
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.runner.captured_decodes import CapturedDecodes
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.engine.runner.samples import Samples
from tokenmill.model.kernels.triton import attention, splits
from tokenmill.startup.assembly import device_runners

SEED = seed_for(__name__)
# What may come changes with every token, so that a mask of another position is a wrong one.
LETTERS = Grammar(json.dumps({"grammars": [{"lark_grammar": "start: /([a-h][i-p]){5}/"}]}), "structured_outputs")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logprobs": 1},
    {"temperature": 0.9, "logprobs": 0},
    {"temperature": 0.6, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "logprobs": 2},
    {"temperature": 0.8, "top_k": 12, "min_p": 0.01, "prompt_logprobs": 1},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "bad_word_ids": ((3,), (9, 5), (17, 4, 8)), "allowed_token_ids": tuple(range(40))},
    {"temperature": 1.3, "min_tokens": 7, "stop_token_ids": tuple(range(20, 90)), "logprobs": 1},
    {"temperature": 1.0, "stop_token_ids": tuple(range(0, 330, 9))},
    {"temperature": 1.0, "grammar": LETTERS},
    {"temperature": 1.0, "grammar": LETTERS, "top_p": 0.9},
]
NATIVE: dict[str, Any] = {"dtype": "bfloat16", "kernels": "native", "page_size": 16, "max_num_batched_tokens": 60}


class LyingDrafter(KnowingDrafter):
    """Proposes what `outputs` says will follow, up to a lie that is anywhere, or nowhere: `lengths` tokens, both in."""

    def __init__(self, outputs: dict[str, list[int]], rng: random.Random, lengths: tuple[int, int] = (0, 6)) -> None:
        self.outputs = outputs
        self.rng = rng
        self.lengths = lengths
        self.counts: Counter[int] = Counter()

    def draft(self, request: Request, limit: int) -> TokenArray:
        known = request.num_tokens - request.num_prompt_tokens
        drafts = [*self.outputs[request.id][known:], *(self.rng.randrange(200) for _ in range(3))]
        drafts = drafts[: min(limit, self.rng.randint(*self.lengths))]
        for _ in range(self.rng.randint(0, 2)):
            if drafts:
                drafts[self.rng.randrange(len(drafts))] = self.rng.randrange(200)
        self.counts[len(drafts)] += 1
        return np.array(drafts, dtype=np.int32)


class HoldingDrafter(LyingDrafter):
    """Waits for launched steps, so that drafts come with overlap too."""

    def holds(self, request: Request, num_running: int) -> bool:
        return True


def lying(wanted: list[AddRequest], plain: list[Any], rng: random.Random, is_overlap: bool = False) -> LyingDrafter:
    kind = HoldingDrafter if is_overlap else LyingDrafter
    return kind({one.id: own[0][0] for one, own in zip(wanted, plain, strict=True)}, rng)


def requests(rng: random.Random, kinds: list[dict[str, Any]], length: int) -> list[AddRequest]:
    made = []
    for number, kind in enumerate(kinds):
        prompt = [rng.randrange(250) for _ in range(rng.choice([1, 4, 15, 30]))]
        params = SamplingParams(**{"seed": number, "max_tokens": rng.randint(length // 2, length), **kind})
        made.append(AddRequest(id=str(number), prompt_token_ids=prompt, params=params))
    return made


def check(
    engine: Engine,
    wanted: list[AddRequest],
    rng: random.Random,
    is_exact: bool,
    lengths: tuple[int, int] = (0, 6),
) -> tuple[Counter[int], Counter[int]]:
    """Returns how many tokens came at once without drafts, and with them."""
    print(f"seed {SEED}")
    plain = run(engine, wanted)
    engine.scheduler.state.drafters = (
        LyingDrafter({name: told(own)[0][0] for name, own in plain.items()}, rng, lengths),
    )
    drafted = run(engine, wanted)
    engine.scheduler.state.drafters = ()
    assert_same(*([told(ran[request.id]) for request in wanted] for ran in (plain, drafted)), is_exact)
    counts = [Counter(len(one.token_ids) for own in each.values() for one in own) for each in (plain, drafted)]
    return counts[0], counts[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shapes: dict[str, dict[str, Any]] = {
        "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 1},
        # For interpreted kernels.
        "qwen3 of a layer": {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 1},
        # Heads that the native attention takes: the bits of the other depend on how texts are cut.
        "mistral": {"sliding_window": 12, "head_dim": 16},
        "qwen3_moe": {},
    }
    return {
        name: make_checkpoint(tmp_path_factory.mktemp("model"), name.split()[0], seed=SEED, **shape)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"dtype": "float32", "kernels": "torch", "attention_backend": "cpu"}),
        ("qwen3", {"dtype": "float32", "attention_backend": "reference", "page_size": 1, "num_pages": 400}),
        ("qwen3", {**NATIVE, "async_scheduling": True, "max_num_seqs": 3}),
        ("qwen3", {**NATIVE, "quantization": "int8", "kv_cache_dtype": "int8"}),
        ("qwen3", {**NATIVE, "kv_cache_dtype": "int4"}),
        ("mistral", {**NATIVE, "num_pages": 14}),
        ("qwen3_moe", NATIVE),
    ],
    ids=["torch", "reference", "native", "int8", "int4 KV", "window and preemption", "experts"],
)
def test_no_bit_of_an_output_changes(models: dict[str, Path], family: str, options: dict[str, Any]) -> None:
    rng = random.Random(SEED)
    with running(models[family], **{"async_scheduling": False, **options}) as engine:
        # The bits of torch's matrix products depend on the number of their rows.
        is_exact = options.get("kernels") == "native"
        plain, drafted = check(engine, requests(rng, KINDS, 24), rng, is_exact)
        assert set(plain) <= {0, 1}
        if not options.get("async_scheduling"):  # with overlap a request is drafted for only where it sat out a step
            assert max(drafted) >= 5
            assert sum(drafted.values()) < sum(plain.values())


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.parametrize(
    "options", [{}, {"batch_invariant": False}, {"enforce_eager": True}], ids=["graphs", "split contexts", "eager"]
)
def test_nor_on_a_device(models: dict[str, Path], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rng, platform, verified = random.Random(SEED), FakePlatform(), Counter[int]()
    small = {"dtype": "float32", "num_pages": 60, "batch_invariant": True, "async_scheduling": False}
    small |= {"max_num_seqs": 10, "max_num_batched_tokens": 40}
    # As a config with drafts has them, but without measuring what interpreted steps cost.
    monkeypatch.setattr(device_runners, "CapturedDecodes", lambda *parts: CapturedDecodes(*parts[:5], 6, *parts[6:]))
    # Short contexts have several splits then.
    ends = splits.SPLIT_ENDS // 16
    for module, name, value in (
        (attention, "SPLIT_KEYS", 16),
        (splits, "SPLIT_KEYS", 16),
        (splits, "SPLIT_ENDS", ends),
    ):
        monkeypatch.setattr(module, name, value)

    def replay(graphs: DecodeGraphs, inputs: Any, starts: Any = None, original: Any = DecodeGraphs.run) -> Any:
        verified[1 if starts is None else len(inputs) // (len(starts) - 1)] += 1
        return original(graphs, inputs, starts)

    monkeypatch.setattr(DecodeGraphs, "run", replay)
    with nan_in_new_memory(), running(models["qwen3 of a layer"], platform, **{**small, **options}) as engine:
        # Short and in every step, so that there are always steps of drafts without a prompt, and right ones.
        _, drafted = check(engine, requests(rng, [KINDS[1], KINDS[4]], 12), rng, is_exact=False, lengths=(1, 3))
        assert max(drafted) > 1
    print(f"tokens of a request in the graphs that were replayed: {verified}")
    assert bool(verified) == ("enforce_eager" not in options)
    assert max(verified, default=9) > 1, "drafts ran in graphs that read the keys of their request once"


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill new memory with NaN: tokens of padding may leave it, and no others may see it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_not_due_fails_nobody(tmp_path: Path) -> None:
    """A wrong draft that makes NaN of all behind it. (In torch's attention it also does of what comes before it.)"""
    rng = random.Random(SEED)
    model = poisoned(make_checkpoint(tmp_path, "qwen3", seed=SEED))
    with running(model, **NATIVE, async_scheduling=False) as engine:
        wanted = requests(rng, [{"temperature": 0.0, "logit_bias": {POISON: -100.0}, "logprobs": 1}] * 4, 12)
        wanted = [msgspec.structs.replace(one, prompt_token_ids=[9, 10 + int(one.id)]) for one in wanted]

        class Poisoner(LyingDrafter):
            def draft(self, request: Request, limit: int) -> TokenArray:
                drafts = super().draft(request, limit)
                drafts[self.rng.randint(0, 3) :] = POISON
                return drafts

        plain = run(engine, wanted)
        engine.scheduler.state.drafters = (Poisoner({name: told(own)[0][0] for name, own in plain.items()}, rng),)
        drafted = run(engine, wanted)
        assert [told(own) for own in drafted.values()] == [told(own) for own in plain.values()], f"seed {SEED}"
        assert not any(own[-1].error for own in plain.values())


def plan_of(columns: list[tuple[int, int, int, int]], drafts: list[int] | None = None) -> StepPlan:
    """A plan of (row, computed, scheduled, samples)."""
    rows, computed, scheduled, samples = (np.array(column, dtype=np.int32) for column in zip(*columns, strict=True))
    none, no_rows = np.empty(0, dtype=np.int32), tuple[AdmittedRequest, ...]()
    draft_ids = None if drafts is None else np.array(drafts, dtype=np.int32)
    ids = tuple(map(str, rows))
    return StepPlan(1, no_rows, ids, rows, computed, scheduled, samples, none, none, none, draft_ids)


def test_samples_stand_where_the_plan_says() -> None:
    # A chunk that samples nothing, a decode with two drafts, the end of a prompt, one with a draft behind its prompt.
    samples = Samples.from_plan(plan_of([(4, 0, 5, 0), (2, 10, 3, 3), (7, 3, 4, 1), (1, 0, 3, 2)], [50, 51, 52]))
    assert samples.query_starts.tolist() == [0, 5, 8, 12, 15]
    assert samples.indices.tolist() == [1, 1, 1, 2, 3, 3]
    assert samples.rows.tolist() == [2, 2, 2, 7, 1, 1]
    assert samples.positions.tolist() == [11, 12, 13, 7, 2, 3]
    assert samples.outputs.tolist() == [5, 6, 7, 11, 13, 14]
    assert samples.drafts is not None
    assert samples.drafts.tolist() == [50, 51, -1, -1, 52, -1]


def test_tokens_are_due_up_to_the_first_that_was_not_drafted() -> None:
    samples = Samples.from_plan(plan_of([(0, 9, 3, 3), (1, 9, 3, 3), (2, 9, 3, 3), (3, 9, 1, 1)], [1, 2, 1, 2, 1, 2]))
    drawn = np.array([1, 2, 3, 1, 9, 3, 9, 2, 3, 5], dtype=np.int32)
    assert samples.are_due(drawn).tolist() == [True] * 3 + [True, True, False] + [True, False, False] + [True]
    assert Samples.from_plan(plan_of([(0, 9, 1, 1), (1, 0, 8, 0)])).are_due(drawn[:1]).tolist() == [True]
