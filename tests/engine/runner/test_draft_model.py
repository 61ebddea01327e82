"""A second model that drafts: no output changes, and where it is the model itself every greedy draft is right.

The latter shows that its KV, its positions and its pages are those of the model: behind prefixes that the cache had,
prompts in chunks, rejected drafts, preemptions, and in sessions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.canonical import tensors_of
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_drafts import KINDS, NATIVE, requests
from tests.engine.runner.test_not_numbers import POISON, poisoned, run
from tests.engine.runner.told import assert_same, told
from tests.engine.scheduler.drafters import KnowingDrafter
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.engine.speculation.draft_model import DraftModel
from tokenmill.engine.speculation.draft_rows import MOST_REST, MOST_ROWS
from tokenmill.startup.assembly.drafting import find_draft
from tokenmill.startup.assembly.loading import StartupTimer
from tokenmill.startup.assembly.setup import BuiltEngine, build_engine

SEED = seed_for(__name__)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class Offering(KnowingDrafter):
    """Offers every proposal whole, and counts."""

    def __init__(self) -> None:
        self.num_drafts = self.num_accepted = self.longest = 0

    def draft(self, request: Request, limit: int) -> TokenArray:
        proposal = request.proposal
        if proposal is None:
            return np.empty(0, dtype=np.int32)
        end = request.num_tokens + len(proposal.token_ids)
        assert request.num_tokens < end < request.max_tokens_total, "a proposal ends where the request does"
        self.longest = max(self.longest, end)
        return proposal.token_ids[:limit]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        super().observe(request, num_drafts, num_accepted)
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    @property
    def acceptance(self) -> float:
        assert self.num_drafts, "something was drafted"
        return self.num_accepted / self.num_drafts


class Holding(Offering):
    """Lets requests wait for what launched steps bring: only then may drafts follow it, where steps overlap."""

    def holds(self, request: Request, num_running: int) -> bool:
        return True


def config(model: Path, draft: Path | None, num_tokens: int = 4, **options: Any) -> EngineConfig:
    given: dict[str, Any] = {"max_num_seqs": 8, "num_pages": 200, "max_model_len": 200, "async_scheduling": False}
    if draft is not None:
        chosen = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_tokens}
        given["speculative_config"] = json.dumps(chosen)
    return EngineConfig(model=str(model), num_threads=1, device="cpu", **{**given, **options}).resolve()


@contextmanager
def drafting(
    model: Path, draft: Path | None, num_tokens: int = 4, drafter: type[Offering] = Offering, **options: Any
) -> Iterator[tuple[Engine, Offering]]:
    """An engine whose drafter is ours from the first request on."""
    engine = build_engine(config(model, draft, num_tokens, **options)).engine
    ours = drafter()
    engine.scheduler.state.drafters = (ours,)
    try:
        yield engine, ours
    finally:
        engine.close()


def draft_model_of(engine: Engine) -> DraftModel:
    runner: ModelRunner = engine.executor.runner  # type: ignore[attr-defined]
    assert runner.draft_model is not None
    return runner.draft_model


def prompts(rng: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    return [[rng.randrange(250) for _ in range(length)] for length in lengths]


def greedy(name: str, prompt: list[int], max_tokens: int = 40) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(id=name, prompt_token_ids=prompt, params=params)


def answers(engine: Engine, wanted: list[AddRequest]) -> list[Any]:
    return [told(outputs) for outputs in run(engine, wanted).values()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=SEED)


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape over the same tokens: what it drafts is as good as chance."""
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_checkpoint(tmp_path_factory.mktemp("sibling"), "qwen3", seed=SEED + 1, **shape)


@pytest.mark.parametrize("num_tokens", [1, 4, 19])
def test_its_own_drafts_are_always_right(model: Path, num_tokens: int) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    wanted = [greedy(str(i), one) for i, one in enumerate(prompts(rng, [1, 3, 15, 16, 17, 40, 90, 130] * 2))]
    with drafting(model, None, **NATIVE) as (engine, _):
        plain = answers(engine, wanted)
    with drafting(model, model, num_tokens, **NATIVE) as (engine, drafter):
        assert answers(engine, wanted) == plain
        assert drafter.acceptance >= 0.99
        # Of the 39 tokens of each request behind its first one; prompts beside it may leave drafts no room in a step.
        assert drafter.num_accepted >= len(wanted) * 39 * num_tokens // (num_tokens + 1) // 2


def test_so_are_those_of_the_demo_model() -> None:
    rng, demo = random.Random(SEED), demo_model_path()
    wanted = [greedy(str(i), one) for i, one in enumerate(prompts(rng, [5, 70]))]
    with drafting(demo, demo, **{**NATIVE, "async_scheduling": True}, drafter=Holding) as (engine, drafter):
        answers(engine, wanted)
        assert drafter.acceptance >= 0.99


def test_a_prefix_from_the_cache_has_kv_of_both(model: Path) -> None:
    """A conversation: each turn finds what the turns before it computed, outputs among that."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with drafting(model, model, **NATIVE) as (engine, drafter):
        text = prompts(rng, [50])[0]
        for turn in range(4):
            (outputs,) = run(engine, [greedy(f"turn {turn}", text, 25)]).values()
            assert turn == 0 or outputs[-1].num_cached_tokens >= len(text) - 24
            text += [token for one in outputs for token in one.token_ids] + [rng.randrange(250)]
        assert drafter.acceptance >= 0.99
        assert drafter.num_accepted > 60


def test_what_its_pages_hold_changes_acceptance_and_no_token(model: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    text = prompts(rng, [100])[0]
    wanted = [greedy(str(number), [*text, number], 30) for number in range(6)]
    with drafting(model, None, **NATIVE) as (engine, _):
        plain = answers(engine, wanted)
    with drafting(model, model, **NATIVE) as (engine, drafter):
        run(engine, [greedy("first", text, 1)])
        for tensor in tensors_of(draft_model_of(engine)._attention.kv):
            tensor.normal_(std=3.0)
        assert answers(engine, wanted) == plain
        assert drafter.acceptance < 0.9, "the drafts did depend on them"
    with drafting(model, model, **NATIVE) as (engine, drafter):
        for tensor in tensors_of(draft_model_of(engine)._attention.kv):
            tensor.fill_(torch.nan)
        assert answers(engine, wanted) == plain
        assert drafter.acceptance >= 0.99, "nothing is read that was not written before"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {**NATIVE, "num_pages": 16, "admission": "optimistic"}),
        ("qwen3", {**NATIVE, "num_pages": 24, "async_scheduling": True}),
        ("mistral", {**NATIVE, "num_pages": 24, "quantization": "int8", "batch_policy": "prefill-first"}),
        ("qwen3_moe", {"dtype": "float32", "kernels": "torch", "num_pages": 160, "page_size": 4}),
    ],
    ids=["native", "overlap", "window and int8", "torch"],
)
def test_no_output_changes_whatever_is_asked_for(tmp_path: Path, sibling: Path, family: str, options: Any) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    shape = {"mistral": {"hidden_size": 64, "sliding_window": 20}}.get(family, {})
    target = make_checkpoint(tmp_path, family, seed=SEED, **shape)
    wanted = requests(rng, KINDS, 40)
    is_exact = options.get("kernels") == "native"
    drafter = Holding if options.get("async_scheduling") else Offering
    with drafting(target, None, **options) as (engine, _):
        plain = answers(engine, wanted)
    for draft in (target, sibling):
        with drafting(target, draft, drafter=drafter, **options) as (engine, ours):
            assert_same(plain, answers(engine, wanted), is_exact)
            assert ours.num_drafts > 40


def test_its_own_drafts_stay_right_through_preemptions(model: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    wanted = [greedy(str(i), one, 60) for i, one in enumerate(prompts(rng, [40, 7, 33, 16, 20, 1, 50, 12]))]
    tight = {**NATIVE, "num_pages": 20, "max_model_len": 120, "admission": "optimistic"}
    with drafting(model, model, **tight) as (engine, drafter):
        answers(engine, wanted)
        assert engine.stats().num_preemptions > 0
        assert drafter.acceptance >= 0.99


def test_sessions_go_on_behind_what_they_have(model: Path) -> None:
    """An input drops the last token of the turn before, which nothing has run, but drafts may have followed it."""
    print(f"seed {SEED}")
    turns = prompts(random.Random(SEED), [30, 1, 17, 9])

    def talk(engine: Engine) -> list[int]:
        said: list[int] = []
        engine.add(AddRequest(id="session", prompt_token_ids=turns[0], params=GREEDY, is_resumable=True))
        for number, turn in enumerate(turns):
            if number:
                engine.extend("session", turn, GREEDY, is_last=turn is turns[-1])
            while engine.has_work:
                said += [token for output in engine.step() for token in output.token_ids]
        return said

    with drafting(model, None, **NATIVE) as (engine, _):
        plain = talk(engine)
    with drafting(model, model, **NATIVE) as (engine, drafter):
        assert talk(engine) == plain
        assert len(plain) > 3 * GREEDY.max_tokens
        assert drafter.acceptance >= 0.99


def test_drafts_end_with_the_context_of_the_draft_model(tmp_path: Path, model: Path) -> None:
    """The same weights with fewer positions."""
    print(f"seed {SEED}")
    short = make_checkpoint(tmp_path, "qwen3", seed=SEED, max_position_embeddings=70)
    wanted = [greedy(str(i), one, 60) for i, one in enumerate(prompts(random.Random(SEED), [3, 40, 66, 69, 90]))]
    with drafting(model, None, **NATIVE) as (engine, _):
        plain = answers(engine, wanted)
    with drafting(model, short, **NATIVE) as (engine, drafter):
        assert answers(engine, wanted) == plain
        assert drafter.acceptance >= 0.99
        assert 60 < drafter.longest <= 70


def test_a_draft_model_without_numbers_drafts_nothing(tmp_path: Path, model: Path) -> None:
    ill = poisoned(make_checkpoint(tmp_path, "qwen3", seed=SEED))
    well, poisonous = [9, 10, 11], [9, POISON, 11]
    wanted = [greedy("well", well, 12), greedy("ill", poisonous, 12)]
    with drafting(model, None, **NATIVE) as (engine, _):
        plain = answers(engine, wanted)
    with drafting(model, ill, **NATIVE) as (engine, drafter):
        assert answers(engine, wanted[1:]) == plain[1:]
        assert drafter.num_drafts == 0
        assert answers(engine, wanted) == plain


class Idle(Offering):
    """Has no use for drafts, and counts those that it is offered."""

    num_offered = 0

    def draft(self, request: Request, limit: int) -> TokenArray:
        self.num_offered += request.proposal is not None
        return np.empty(0, dtype=np.int32)


def test_who_uses_no_drafts_gets_few(model: Path) -> None:
    with drafting(model, model, drafter=Idle, **NATIVE) as (engine, drafter):
        run(engine, [greedy("all", [1, 2, 3], 100)])
        # Behind its first steps, then after 1, 3, 7, 15 and 31 that it sits out, and so on.
        assert isinstance(drafter, Idle)
        assert 100 // (MOST_REST + 1) < drafter.num_offered <= 5 + 100 // (MOST_REST + 1)
        # Those that come after it begin as it has ended.
        before = drafter.num_offered
        run(engine, [greedy(str(number), [number, 2, 3], MOST_REST) for number in range(8)])
        assert drafter.num_offered == before


def test_a_busy_engine_drafts_for_some(model: Path) -> None:
    sizes = {"max_num_seqs": MOST_ROWS + 8, "max_num_batched_tokens": 400}
    wanted = [greedy(str(number), [number, 5], 12) for number in range(MOST_ROWS + 8)]
    with drafting(model, None, **{**NATIVE, **sizes}) as (engine, _):
        plain = answers(engine, wanted)
    with drafting(model, model, 3, **{**NATIVE, **sizes}) as (engine, drafter):
        for request in wanted:
            engine.add(request)
        num_offered = 0
        while not num_offered:
            engine.step()
            num_offered = sum(one.proposal is not None for one in engine.scheduler.requests.values())
        assert num_offered == MOST_ROWS
        engine.abort([request.id for request in wanted])
        assert answers(engine, wanted) == plain
        assert drafter.acceptance >= 0.99


def test_the_memory_of_both_is_counted(model: Path, sibling: Path) -> None:
    def built(draft: Path | None, **size: Any) -> BuiltEngine:
        made = build_engine(config(model, draft, **{**NATIVE, **size}))
        made.engine.close()
        return made

    alone, both = (built(draft, num_pages=100).ready for draft in (None, sibling))
    page_bytes = alone.kv_bytes // 101
    scratch = MOST_ROWS  # a page for four tokens of each
    draft_page_bytes = (both.kv_bytes - alone.kv_bytes) // (101 + scratch)
    assert draft_page_bytes == page_bytes // 4, "one layer and one head instead of two"
    assert both.weight_bytes > alone.weight_bytes
    sized = built(sibling, num_pages=None, kv_cache_memory_bytes=120 * (page_bytes + draft_page_bytes)).ready
    assert sized.num_pages == 119


def test_it_runs_as_the_model_does_where_it_can(tmp_path: Path, model: Path) -> None:
    """Heads of eight are not for the native attention, which was asked for."""
    narrow = make_checkpoint(tmp_path, "llama", seed=SEED)
    wanted = [greedy("one", [1, 2, 3])]
    with drafting(model, None, **NATIVE) as (engine, _):
        plain = answers(engine, wanted)
    built = build_engine(config(model, narrow, attention_backend="native", **NATIVE))
    draft = built.model.draft
    assert draft is not None
    assert draft.attention.name == "cpu"
    assert "--attention-backend auto" in draft.describe() and "multiple of 16" in draft.describe()
    built.engine.scheduler.state.drafters = (Offering(),)
    assert answers(built.engine, wanted) == plain
    built.engine.close()
    same = build_engine(config(model, model, attention_backend="native", **NATIVE))
    same.engine.close()
    assert same.model.draft is not None
    assert same.model.draft.attention.name == "native" and not same.model.draft.note


def test_what_cannot_draft_is_refused(tmp_path: Path, model: Path) -> None:
    larger = make_checkpoint(tmp_path / "larger", "qwen3", vocab_size=340)
    other = make_checkpoint(tmp_path / "other", "qwen3")
    make_tokenizer(other, 300)
    same = make_checkpoint(tmp_path / "same", "qwen3")
    recurrent = make_checkpoint(tmp_path / "recurrent", "lfm2")
    with pytest.raises(InvalidConfig, match=r"keeps recurrent states, which cannot go back"):
        build_engine(config(model, recurrent))
    with pytest.raises(InvalidConfig, match=r"a vocabulary of 340 tokens, the model one of 331"):
        build_engine(config(model, larger))
    with pytest.raises(InvalidConfig, match=r"has another tokenizer than the model"):
        build_engine(config(model, other))
    with pytest.raises(InvalidCheckpoint, match=r"there is no folder .*nowhere"):
        build_engine(config(model, tmp_path / "nowhere"))
    for options, why in (
        ({"speculative_config": {"quantization": "int8"}}, r"quantization int8 is for CPUs"),
        ({"pipeline_parallel_size": 2}, r"take --tensor-parallel-size instead of --pipeline-parallel-size, or suffix"),
        ({"speculative_config": {"method": "eagle3"}}, r"draft heads and MTP layers run on CPUs so far"),
    ):
        plain = {"dtype": "float32", "kernels": "torch", **options}
        chosen = {"method": "draft_model", "model": str(same), **plain.pop("speculative_config", {})}
        wanted = config(model, None, speculative_config=json.dumps(chosen), **plain)
        with pytest.raises(InvalidConfig, match=why):
            find_draft(wanted, FakePlatform(), model, 1, StartupTimer(lambda *_: None).phase)
