"""EAGLE-3 heads: what they propose is what the formulas say, and no output changes.

The formulas are a reference in torch over hidden states from transformers (`reference_head.py`). It knows no pages,
so each proposal of an engine shows that pages, slots and positions are right: behind prefixes that the cache had,
prompts in chunks, drafts that were right or wrong, preemptions, and in batches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import load_oracle, make_checkpoint
from tests.draft_heads import FORMS, HeadShape, make_head
from tests.engine.runner.test_draft_model import Holding, Offering, answers, config, greedy, prompts
from tests.engine.runner.test_drafts import KINDS, NATIVE, lying, requests
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same
from tests.engine.speculation.reference_head import ReferenceHead
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.request import Proposal
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.speculation import eagle_head
from tokenmill.engine.speculation.eagle_head import EagleHead
from tokenmill.lab.simulate.replay import replay
from tokenmill.startup.assembly.setup import build_engine

SEED = seed_for(__name__)
TORCH: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "attention_backend": "cpu", "page_size": 4}
TIGHT: dict[str, Any] = {"num_pages": 20, "max_model_len": 120, "admission": "optimistic"}
BOUNDARIES = (1, 2, 0)
# Root mean square of differences, by that of logits. In bfloat16 the model's hidden states differ, too.
# Of half of all drafts, and of the worst: softmaxes may be sharp.
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (0.1, 0.6)}


@dataclass
class Watch:
    """The proposals of a head: the text so far, the drafts, and their logits."""

    head: EagleHead
    seen: list[tuple[list[int], list[int], list[np.ndarray[Any, Any]]]] = field(default_factory=list)
    _logits: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._propose, self._best = self.head.propose, self.head._best
        self.head.propose, self.head._best = self.propose, self.best  # type: ignore[method-assign]

    def best(self, outputs: Any) -> Any:
        self._logits.append(np.asarray(self.head._model.logits(outputs)))  # type: ignore[attr-defined]
        return self._best(outputs)

    def propose(self, plan: StepPlan, result: StepResult) -> dict[int, Proposal]:
        self._logits = []
        proposals = self._propose(plan, result)
        brought = np.diff(result.token_starts)
        order = sorted(proposals, key=lambda index: -len(proposals[index].token_ids))
        for place, index in enumerate(order):
            row, launched = plan.rows[index], plan.num_computed[index] + plan.num_scheduled[index]
            known = launched - plan.num_samples[index] + brought[index] + 1
            drafts = proposals[index].token_ids.tolist()
            logits = [depth[place] for depth in self._logits[: len(drafts)]]
            likely = [torch.tensor(one).softmax(0).max() for one in logits]
            assert np.allclose(proposals[index].probabilities, likely, rtol=1e-4)
            self.seen.append((self.head._tokens[row, :known].tolist(), drafts, logits))
        return proposals


class Oracle:
    """The model in transformers, and the formulas of a head."""

    def __init__(self, model: Path, head: Path, boundaries: Sequence[int] = BOUNDARIES) -> None:
        self._model: transformers.PreTrainedModel = load_oracle(model)
        embedding, output = self._model.get_input_embeddings().weight, self._model.get_output_embeddings().weight
        self._head = ReferenceHead(head, embedding.detach(), output.detach())
        self._boundaries = list(boundaries)

    def check(self, watch: Watch, dtype: str) -> None:
        """Compare all proposals."""
        errors = sorted(self.worst(*one) for one in watch.seen)
        half, worst = BOUNDS[dtype]
        assert errors[len(errors) // 2] < half
        assert errors[-1] < worst

    @torch.inference_mode()
    def worst(self, text: list[int], drafts: list[int], logits: list[np.ndarray[Any, Any]]) -> float:
        """By which part the logits of a draft differ at most; a draft must be the best of those that it comes from."""
        states = self._model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        taps = torch.stack([states[boundary][0] for boundary in self._boundaries], 1)
        wanted = self._head.logits(text, taps, drafts)
        for draft, own in zip(drafts, logits, strict=True):
            assert draft == self._head.token_ids[int(own.argmax())]
        return max(
            float((torch.tensor(own) - one).square().mean().sqrt() / one.square().mean().sqrt())
            for own, one in zip(logits, wanted, strict=True)
        )


@contextmanager
def drafting(model: Path, head: Path | None, drafter: Any = Offering, **options: Any) -> Iterator[tuple[Engine, Any]]:
    """An engine with a head, whose drafter is ours from the first request on."""
    if head is not None:
        chosen = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
        options = {"speculative_config": json.dumps(chosen), **options}
    engine = build_engine(config(model, None, **options)).engine
    ours = drafter()
    engine.scheduler.state.drafters = (ours,)
    try:
        yield engine, ours
    finally:
        engine.close()


def head_of(engine: Engine) -> EagleHead:
    executor = getattr(engine.executor, "executor", engine.executor)  # the one behind transfers
    head = executor.runner.draft_model
    assert isinstance(head, EagleHead)
    return head


@pytest.fixture(autouse=True)
def chains_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads are unsure of all that they draft."""
    monkeypatch.setattr(eagle_head, "LEAST_CHANCE", 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": 3}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=SEED, **shape)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    shape = HeadShape(num_draft_tokens=200, boundaries=BOUNDARIES)
    return make_head(tmp_path_factory.mktemp("head"), model, shape, SEED + 1)


@pytest.mark.parametrize("options", [NATIVE, TORCH], ids=["native", "torch"])
@pytest.mark.parametrize(
    "shape",
    [
        *(HeadShape(form, num_draft_tokens=200) for form in FORMS),
        HeadShape(has_embedding=True, flags={"norm_before_residual": True}),
        HeadShape(flags={"norm_before_fc": True, "norm_output": True}, num_heads=2, num_kv_heads=1),
        HeadShape("sglang", flags={"fc_norm": True}, has_head=False),
        HeadShape("speculators", flags={"norm_before_residual": False}, has_embedding=True, num_draft_tokens=90),
    ],
    ids=[*FORMS, "normed stream", "norm before fc", "norms of taps", "plain stream"],
)
def test_drafts_are_those_of_the_formulas(tmp_path: Path, model: Path, shape: HeadShape, options: Any) -> None:
    print(f"seed {SEED}")
    head = make_head(tmp_path, model, replace(shape, boundaries=BOUNDARIES), SEED + 2)
    oracle = Oracle(model, head)
    with drafting(model, head, **options) as (engine, _):
        watch = Watch(head_of(engine))
        for number, prompt in enumerate(prompts(random.Random(SEED), [1, 15, 16, 90])):
            run(engine, [greedy(str(number), prompt, 20)])
    assert len(watch.seen) > 60
    oracle.check(watch, options["dtype"])


@pytest.mark.parametrize(
    "options", [NATIVE, TORCH, {**TORCH, "attention_backend": "reference"}], ids=["native", "torch", "reference"]
)
def test_also_in_batches_behind_right_and_wrong_drafts_and_preemptions(model: Path, head: Path, options: Any) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    wanted = [greedy(str(i), one, 40) for i, one in enumerate(prompts(rng, [40, 7, 33, 16, 20, 1, 50, 12]))]
    tight = {**options, **TIGHT, "num_pages": 20 * 16 // options["page_size"]}
    with drafting(model, None, **tight) as (engine, _):
        plain = answers(engine, wanted)
    oracle = Oracle(model, head)
    with drafting(model, head, lambda: lying(wanted, plain, rng), **tight) as (engine, _):
        watch = Watch(head_of(engine))
        assert_same(plain, answers(engine, wanted), options is NATIVE)
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_accepted_tokens > 100
    oracle.check(watch, options["dtype"])


@pytest.mark.parametrize(
    "family", ["llama", "granite", "gemma3", "gemma4", "olmo2", "gpt_oss", "qwen3_moe", "phi3", "lfm2", "qwen3_5"]
)
def test_hidden_states_are_those_of_each_family(tmp_path: Path, family: str) -> None:
    print(f"seed {SEED}")
    target = make_checkpoint(tmp_path / "model", family, seed=SEED)
    head = make_head(tmp_path / "head", target, HeadShape(boundaries=(0, 1, 1)), SEED)
    wanted = [greedy("one", prompts(random.Random(SEED), [30])[0], 10)]
    with drafting(target, None, **TORCH) as (engine, _):
        plain = answers(engine, wanted)
    with drafting(target, head, **TORCH) as (engine, _):
        watch = Watch(head_of(engine))
        assert_same(plain, answers(engine, wanted), False)
    Oracle(target, head, (0, 1, 1)).check(watch, "float32")


def test_long_texts_that_share_their_pages(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    target = make_checkpoint(tmp_path / "model", "qwen3", seed=SEED, max_position_embeddings=1000)
    shape = HeadShape(num_draft_tokens=90, boundaries=(0, 1, 1), max_position=1000)
    head = make_head(tmp_path / "head", target, shape, SEED)
    shared = prompts(rng, [620])[0]
    wanted = [greedy(str(number), [*shared, *one], 8) for number, one in enumerate(prompts(rng, [1, 9, 30, 70] * 2))]
    sizes = {"num_pages": 400, "max_model_len": 800, "max_num_batched_tokens": 300}
    with drafting(target, head, **{**NATIVE, **sizes}) as (engine, _):
        run(engine, [greedy("first", shared, 1)])
        watch = Watch(head_of(engine))
        run(engine, wanted)
    watch.seen = rng.sample(watch.seen, 16)
    Oracle(target, head, (0, 1, 1)).check(watch, "bfloat16")


def test_a_prefix_from_the_cache_has_all_that_the_head_needs(model: Path, head: Path) -> None:
    """A conversation: each turn finds what the turns before it computed, and goes on behind it with another token."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    oracle = Oracle(model, head)
    with drafting(model, head, **TORCH) as (engine, _):
        watch = Watch(head_of(engine))
        text = prompts(rng, [50])[0]
        for turn in range(4):
            (outputs,) = run(engine, [greedy(f"turn {turn}", text, 25)]).values()
            assert turn == 0 or outputs[-1].num_cached_tokens >= len(text) - 12
            text += [token for one in outputs for token in one.token_ids][:-3]
            text.append(rng.randrange(250))
            # Others go on behind the same pages with other tokens.
            run(engine, [greedy(f"{turn} {number}", [*text[:48], number, 7], 6) for number in range(3)])
    oracle.check(watch, "float32")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {**NATIVE, "num_pages": 16, "admission": "optimistic"}),
        ("llama", {**NATIVE, "num_pages": 24, "async_scheduling": True}),
        ("mistral", {**NATIVE, "num_pages": 24, "quantization": "int8", "batch_policy": "prefill-first"}),
        ("granite", {**NATIVE, "num_pages": 30, "quantization": "int4", "kv_cache_dtype": "int8"}),
        ("gemma3", {**NATIVE, "num_pages": 40}),
        ("qwen3_moe", {**TORCH, "num_pages": 160}),
    ],
    ids=["native", "overlap", "window and int8", "int4", "gemma", "torch"],
)
def test_no_output_changes_whatever_is_asked_for(tmp_path: Path, family: str, options: Any) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    shape = {"mistral": {"sliding_window": 20, "head_dim": 16}, "qwen3": {}, "gemma3": {}}.get(family, {})
    target = make_checkpoint(tmp_path / "model", family, seed=SEED, **{"hidden_size": 64, **shape})
    head = make_head(tmp_path / "head", target, HeadShape(num_draft_tokens=150, boundaries=(0, 1, 1)), SEED)
    wanted = requests(rng, KINDS, 40)
    is_exact, is_overlap = options is not TORCH and options["kernels"] == "native", "async_scheduling" in options
    with drafting(target, None, **options) as (engine, _):
        plain = answers(engine, wanted)
    drafters = [Holding if is_overlap else Offering, lambda: lying(wanted, plain, rng, is_overlap)]
    for drafter in drafters:
        with drafting(target, head, drafter, **options) as (engine, _):
            assert_same(plain, answers(engine, wanted), is_exact)
            assert engine.stats().num_draft_tokens > 8


def test_steps_cost_nothing_more_where_nothing_is_tapped(model: Path) -> None:
    with drafting(model, None, **NATIVE) as (engine, _):
        runner = engine.executor.runner  # type: ignore[attr-defined]
        assert runner.model._decoder.boundaries == ()
        assert runner._rows.extensions == ()


def test_places_are_those_that_the_flag_names_then_the_config_then_the_usual(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said, silent = (
        make_head(tmp_path / name, model, HeadShape(boundaries=own), SEED)
        for name, own in (("said", BOUNDARIES), ("silent", None))
    )
    usual = {"method": "eagle3", "model": str(silent)}
    for chosen, places in (
        ({"method": "eagle3", "model": str(said)}, "1, 2, 0"),
        (usual, "2, 1, 0"),
        ({**usual, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "0, 1, 2"),
    ):
        caplog.clear()
        built = build_engine(config(model, None, speculative_config=json.dumps(chosen), **NATIVE))
        built.engine.close()
        assert f"behind {places} layers" in str(built.ready.speculation)
        assert ("does not say where" in caplog.text) == (chosen is usual)


def test_chains_end_where_the_head_is_unsure(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chains(least: float) -> list[Any]:
        """The chances of the drafts of each chain: of each and all before it."""
        monkeypatch.setattr(eagle_head, "LEAST_CHANCE", least)
        with drafting(model, head, **NATIVE) as (engine, _):
            watch = Watch(head_of(engine))
            run(engine, [greedy("one", [1, 2, 3], 60)])
        assert all(len(drafts) == len(logits) for _, drafts, logits in watch.seen)
        # The last ones end where the answer does.
        return [np.cumprod([torch.tensor(one).softmax(0).max() for one in logits]) for _, _, logits in watch.seen[:-5]]

    print(f"seed {SEED}")
    pairs = sorted(chances[1] for chances in chains(0.0) if len(chances) > 1)
    least = float(pairs[len(pairs) // 2 - 1] + pairs[len(pairs) // 2]) / 2
    bounded = chains(least)
    assert 1 <= min(map(len, bounded)) < max(map(len, bounded)) <= 4
    for chances in bounded:
        assert (chances[:-1] >= least).all()
        assert len(chances) == 4 or chances[-1] < least


def test_a_replay_drafts_the_same(tmp_path: Path, model: Path, head: Path) -> None:
    print(f"seed {SEED}")
    log, chosen = tmp_path / "log", json.dumps({"method": "eagle3", "model": str(head)})
    options = {**NATIVE, "speculative_config": chosen, "step_log": str(log)}
    engine = build_engine(config(model, None, **options)).engine
    run(engine, [greedy(str(number), one, 30) for number, one in enumerate(prompts(random.Random(SEED), [3, 20, 40]))])
    engine.close()
    outcome = replay(log)
    assert outcome.difference is None
    # How many drafts a step has depends on what steps have cost: with few, 30 tokens take 30 steps.
    assert outcome.num_plans > 10
    assert b"chances" in log.read_bytes()


def test_a_head_is_found_by_its_config(tmp_path: Path, model: Path, head: Path) -> None:
    chosen = json.dumps({"model": str(head), "num_speculative_tokens": 3})
    with drafting(model, None, **{**NATIVE, "speculative_config": chosen}) as (engine, _):
        assert isinstance(head_of(engine), EagleHead)


def test_the_memory_of_both_is_counted(model: Path, head: Path) -> None:
    def built(own: Path | None) -> Any:
        chosen = {} if own is None else {"speculative_config": json.dumps({"method": "eagle3", "model": str(own)})}
        made = build_engine(config(model, None, **{**NATIVE, **chosen}))
        made.engine.close()
        return made

    alone, both = built(None), built(head)
    draft = both.model.draft
    tokens, hidden = NATIVE["page_size"], 32
    assert draft.page_bytes == tokens * hidden * 2 + tokens * 2 * 2 * 16 * 2, "of each token g, and keys and values"
    assert both.ready.kv_bytes == alone.ready.kv_bytes + 201 * draft.page_bytes + draft.scratch_bytes
    assert both.ready.weight_bytes > alone.ready.weight_bytes


def refused(model: Path, head: Path, **options: Any) -> None:
    chosen = json.dumps({"method": "eagle3", "model": str(head)})
    build_engine(config(model, None, **{**NATIVE, "speculative_config": chosen, **options}))


def test_what_is_not_there_is_refused_before_weights_are_read(tmp_path: Path, model: Path, head: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=SEED, hidden_size=64)
    with pytest.raises(InvalidConfig, match="takes hidden states of size 32, the model has 64"):
        refused(other, head)
    with pytest.raises(InvalidConfig, match="of a model that one rank runs"):
        refused(model, head, pipeline_parallel_size=2)
    with pytest.raises(InvalidCheckpoint, match="is no EAGLE-3 head that is supported"):
        refused(model, model)
    chosen = {"method": "eagle3", "model": str(head), "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    with pytest.raises(InvalidConfig, match=r"must be 3 numbers from 0 to 2 .*got \[0, 1, 3\]"):
        refused(model, head, speculative_config=json.dumps(chosen))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, "is no EAGLE-3 head that is supported"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type 'eagle' is not supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, -2, 0]}, "eagle_aux_hidden_state_layer_ids must be numbers"),
        ({"draft_vocab_size": 100}, "d2t must have 100 integers"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(
    tmp_path: Path, model: Path, head: Path, change: dict[str, Any], said: str
) -> None:
    for file in head.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((head / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(InvalidCheckpoint, match=said):
        refused(model, tmp_path)
