"""An EAGLE-3 head behind prefixes from disk: pages bring what it keeps of their tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.draft_heads import HeadShape, make_head
from tests.engine.runner.test_draft_model import greedy, prompts
from tests.engine.runner.test_drafts import NATIVE
from tests.engine.runner.test_not_numbers import run
from tests.engine.speculation.test_eagle_head import BOUNDARIES, TORCH, Oracle, Watch, drafting, head_of
from tests.seeding import seed_for
from tokenmill.engine.speculation import eagle_head

SEED = seed_for(__name__)


@pytest.mark.parametrize("options", [{}, {"kv_layout": "page-first", **NATIVE}], ids=["layer-first", "page-first"])
def test_drafts_behind_a_loaded_prefix_are_those_of_the_formulas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    print(f"seed {SEED}")
    monkeypatch.setattr(eagle_head, "LEAST_CHANCE", 0.0)  # random heads are unsure of all that they draft
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path / "model", "qwen3", seed=SEED, num_hidden_layers=3)
    head = make_head(tmp_path / "head", model, HeadShape(num_draft_tokens=200, boundaries=BOUNDARIES), SEED + 1)
    oracle, text = Oracle(model, head), prompts(rng, [90])[0]
    options = {**TORCH, **options, "kv_disk": str(tmp_path / "disk"), "kv_disk_size": 32 << 20}
    with drafting(model, head, **options) as (engine, _):
        run(engine, [greedy("first", text, 4)])
    with drafting(model, head, **options) as (engine, _):
        watch = Watch(head_of(engine))
        (outputs,) = run(engine, [greedy("again", [*text[:-3], rng.randrange(250)], 12)]).values()
        assert outputs[-1].num_external_cached_tokens >= 64
    oracle.check(watch, options["dtype"])


def test_another_head_finds_no_pages(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path / "model", "qwen3", seed=SEED, num_hidden_layers=3)
    shape, text = HeadShape(num_draft_tokens=200, boundaries=BOUNDARIES), prompts(rng, [90])[0]
    heads = [make_head(tmp_path / f"head {number}", model, shape, SEED + number) for number in (1, 2)]
    options = {**TORCH, "kv_disk": str(tmp_path / "disk"), "kv_disk_size": 32 << 20}
    found = []
    for head in (heads[0], heads[1], heads[0]):
        with drafting(model, head, **options) as (engine, _):
            (outputs,) = run(engine, [greedy("one", text, 2)]).values()
            found.append(outputs[-1].num_external_cached_tokens)
    assert found[:2] == [0, 0]
    assert found[2] >= 64
