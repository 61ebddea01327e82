"""A model's own MTP layer: what it proposes is what the formulas say, no output changes, and drafts are often right."""

from __future__ import annotations

import copy
import json
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import load_oracle, make_checkpoint
from tests.engine.runner.test_draft_model import Holding, Offering, config, greedy, prompts
from tests.engine.runner.test_drafts import KINDS, NATIVE, lying, requests
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same
from tests.engine.speculation.test_draft_states import SHAPE, TIGHT, answers
from tests.engine.speculation.test_eagle_head import Watch, head_of
from tests.model.weights.gguf_writer import write_gguf
from tests.mtp_layers import MtpLayer, add_copy, add_mtp
from tests.seeding import seed_for
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.speculation import eagle_head
from tokenmill.model.weights.hub import fetch
from tokenmill.startup.assembly.setup import build_engine

SEED = seed_for(__name__)
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
TORCH: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "attention_backend": "cpu", "page_size": 4}
# Root mean square of differences, by that of logits, in float32: of half of all drafts, and of the worst.
BOUNDS = (1e-4, 1e-3)
# In bfloat16: by what the formulas differ that are computed in it.
MOST_OF_ROUNDING = (1.5, 4.0)


@contextmanager
def drafting(model: Path, drafter: Any = Offering, **options: Any) -> Iterator[tuple[Engine, Any]]:
    """An engine with the model's layer, whose drafter is ours from the first request on."""
    chosen = json.dumps({"method": "mtp", "num_speculative_tokens": 4})
    engine = build_engine(config(model, None, **{"speculative_config": chosen, **options})).engine
    ours = drafter()
    engine.scheduler.state.drafters = (ours,)
    try:
        yield engine, ours
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def chains_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random layers are unsure of all that they draft."""
    monkeypatch.setattr(eagle_head, "LEAST_CHANCE", 0.0)


def check(watch: Watch, layer: MtpLayer, model: Path, dtype: str) -> None:
    """Compare all proposals with the formulas."""
    head: Any = load_oracle(model).get_output_embeddings()
    rounded, rounded_head = (copy.deepcopy(part).to(torch.bfloat16) for part in (layer, head))
    errors, of_rounding = [], []
    for text, drafts, logits in watch.seen:
        assert drafts == [int(own.argmax()) for own in logits]
        wanted = layer.logits(head, text, drafts)
        errors.append(worst_of([torch.tensor(own) for own in logits], wanted))
        if dtype == "bfloat16":
            of_rounding.append(worst_of(rounded.logits(rounded_head, text, drafts), wanted))
    half, worst = BOUNDS
    if dtype == "bfloat16":
        half, worst = MOST_OF_ROUNDING[0] * statistics.median(of_rounding), MOST_OF_ROUNDING[1] * max(of_rounding)
    assert statistics.median(errors) < half
    assert max(errors) < worst


def worst_of(logits: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """By which part the logits of a chain's draft differ at most."""
    pairs = zip(logits, wanted, strict=True)
    return max(float((own.float() - one).square().mean().sqrt() / one.square().mean().sqrt()) for own, one in pairs)


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_5", NATIVE), *((family, TORCH) for family in FAMILIES)],
    ids=["native", *FAMILIES],
)
def test_drafts_are_those_of_the_formulas(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Behind prompts in chunks, in batches, and behind prefixes that the cache had.

    In bfloat16 random routers choose other experts than in float32: those families are compared in float32.
    """
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path, family, seed=SEED, **SHAPE)
    layer = add_mtp(model, SEED + 1)
    with drafting(model, **options) as (engine, _):
        watch = Watch(head_of(engine))
        made = prompts(rng, [1, 15, 16, 70])
        run(engine, [greedy(str(number), one, 12) for number, one in enumerate(made)])
        run(engine, [greedy("again", [*made[3][:-3], 7, 9], 8)])
    assert len(watch.seen) > 30
    check(watch, layer, model, options["dtype"])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5", NATIVE),
        ("qwen3_5", {**NATIVE, "async_scheduling": True}),
        ("qwen3_next", {**NATIVE, **TIGHT, "num_pages": 20}),
        ("qwen3_5_moe", {**NATIVE, "quantization": "int8"}),
        ("qwen3_5", TORCH),
    ],
    ids=["native", "overlap", "few pages", "int8", "torch"],
)
def test_no_output_changes_whatever_is_asked_for(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path, family, seed=SEED, **SHAPE)
    add_mtp(model, SEED + 1)
    wanted, is_overlap = requests(rng, KINDS, 40), options.get("async_scheduling")
    with drafting(model, **options, speculative_config=None) as (engine, _):
        engine.scheduler.state.drafters = ()
        plain = answers(engine, wanted)
    for drafter in (Holding if is_overlap else Offering, lambda: lying(wanted, plain, rng)):
        with drafting(model, drafter, **options) as (engine, _):
            assert_same(plain, answers(engine, wanted), options is not TORCH)
            assert engine.stats().num_draft_tokens > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_copies_the_last_one_is_right_more_often_than_chance(tmp_path: Path, family: str) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path, family, seed=SEED, **SHAPE)
    layer = add_copy(model)
    wanted = [greedy(str(number), one, 60) for number, one in enumerate(prompts(rng, [30, 40, 50]))]
    with drafting(model, **NATIVE, max_model_len=120) as (engine, _):
        watch = Watch(head_of(engine))
        run(engine, wanted)
        stats = engine.stats()
    share = stats.num_accepted_tokens / stats.num_draft_tokens
    print(f"{share:.2f} of {stats.num_draft_tokens} drafts were right")
    assert share > 0.3, f"by chance it would be 1 of {len(layer.inner.embed_tokens.weight)}"
    assert np.mean([len(drafts) for _, drafts, _ in watch.seen]) > 1


def test_the_flag_as_vllm_has_it(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    model = make_checkpoint(tmp_path, "qwen3_next", seed=SEED, **SHAPE)
    add_mtp(model, SEED)
    asked, params = prompts(random.Random(SEED), [9, 30]), SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    found = []
    for chosen in (None, "mtp", {"method": "qwen3_next_mtp", "num_speculative_tokens": 2, "quantization": "int8"}):
        with LLM(model, num_pages=40, max_model_len=100, speculative_config=chosen) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(asked, params, use_tqdm=False)])
            assert chosen is None or "MTP layer" in str(llm.info.speculation)
    assert found[0] == found[1] == found[2]


def test_a_gguf_file_keeps_the_layer(tmp_path: Path) -> None:
    """Its norms with the 1, as llama.cpp's converter writes them; drafts are those of the formulas again."""
    print(f"seed {SEED}")
    shape = {**SHAPE, "layer_types": None, "full_attention_interval": 2}
    model = make_checkpoint(tmp_path / "model", "qwen3_5", seed=SEED, **shape)
    layer = add_mtp(model, SEED + 1)
    folder = fetch(str(write_gguf(model, "qwen3_5", num_drafting=1)), None, str(tmp_path / "cache"))
    with drafting(Path(folder), **TORCH) as (engine, _):
        watch = Watch(head_of(engine))
        run(engine, [greedy(str(number), one, 8) for number, one in enumerate(prompts(random.Random(SEED), [5, 20]))])
    assert len(watch.seen) > 5
    check(watch, layer, model, "float32")


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    bare = make_checkpoint(tmp_path / "bare", "qwen3_5", seed=SEED)
    several = make_checkpoint(tmp_path / "several", "qwen3_5", seed=SEED)
    add_mtp(several, SEED)
    fields = json.loads((several / "config.json").read_text())
    (several / "config.json").write_text(json.dumps({**fields, "mtp_num_hidden_layers": 2}))
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=SEED)
    for model, error, why in (
        (bare, InvalidConfig, r"no tensors mtp\.\*"),
        (several, InvalidConfig, "has 2 MTP layers"),
        (other, InvalidConfig, r"no tensors mtp\.\*"),
    ):
        with pytest.raises(error, match=why):
            build_engine(config(model, None, speculative_config="mtp"))
    with pytest.raises(InvalidConfig, match="other methods take none"):
        build_engine(config(several, None, speculative_config='{"method": "mtp", "model": "x"}'))
