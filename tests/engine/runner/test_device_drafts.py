"""A second model that drafts on a device: no output changes, and what drafts for itself is always right.

The device is one of the imagination (`fake_platform.py`): kernels are interpreted, and who waits for what is counted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.canonical import tensors_of
from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_draft_model import Holding, Offering, answers, greedy, prompts
from tests.engine.runner.test_drafts import KINDS, nan_in_new_memory, requests
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.core.request import Request, TokenArray
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.speculation.device_drafts import DeviceDrafts
from tokenmill.startup.assembly import speculation as speculation_module
from tokenmill.startup.assembly.setup import build_engine

SEED = seed_for(__name__)
SHAPE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 277, "num_hidden_layers": 1}
SMALL: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "max_model_len": 64, "page_size": 4}
SMALL |= {"num_pages": 60, "dtype": "float32", "async_scheduling": False, "batch_invariant": True}

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU tools/gpu_check.py runs this on the GPU itself")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    print(f"seed {SEED}")
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=SEED, **SHAPE)


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape over the same tokens: what it drafts is as good as chance."""
    shape = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_checkpoint(tmp_path_factory.mktemp("sibling"), "qwen3", seed=SEED + 1, **shape)


@contextmanager
def drafting(
    model: Path, draft: Path | None, platform: FakePlatform, drafter: type[Offering] = Offering, **options: Any
) -> Iterator[tuple[Engine, Offering]]:
    """An engine on the device whose scheduler's drafter is ours, without measuring what interpreted steps cost."""
    given = {**SMALL, **options}
    if draft is not None:
        chosen = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": given.pop("num_tokens", 3)}
        given["speculative_config"] = json.dumps(chosen)
    config = EngineConfig(model=str(model), num_threads=1, device="cpu", **given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation_module, "measure_step_costs", lambda make_engine: [])
        engine = build_engine(config.resolve(), platform=platform).engine
    ours = drafter()
    engine.scheduler.state.drafters = () if draft is None else (ours,)
    try:
        yield engine, ours
    finally:
        engine.close()


class Moody(Offering):
    """Offers some proposals up to a lie that is anywhere, and has no use for others.

    Attributes:
        surprises: of those that ran, where more or fewer tokens were right than were left so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(SEED)
        self.right: dict[str, int] = {}
        self.surprises: list[tuple[int, int, int]] = []
        self.num_unused = 0

    def draft(self, request: Request, limit: int) -> TokenArray:
        drafts = super().draft(request, limit).copy()
        if self.rng.random() < 0.3:
            self.num_unused += len(drafts) > 0
            return drafts[:0]
        right = self.right[request.id] = self.rng.randint(0, len(drafts))
        drafts[right:] = (drafts[right:] + 1) % 250
        return drafts

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        super().observe(request, num_drafts, num_accepted)
        right = min(self.right[request.id], num_drafts)
        if num_accepted != right:
            self.surprises.append((num_drafts, right, num_accepted))


def drafts_of(engine: Engine) -> DeviceDrafts:
    drafter = engine.executor.runner.draft_model  # type: ignore[attr-defined]
    assert isinstance(drafter, DeviceDrafts)
    return drafter


@pytest.mark.parametrize(
    ("drafter", "options"),
    [(Offering, {}), (Holding, {"async_scheduling": True}), (Offering, {"enforce_eager": True, "num_tokens": 6})],
    ids=["graphs", "overlap", "eager"],
)
def test_its_own_drafts_are_always_right(model: Path, drafter: type[Offering], options: dict[str, Any]) -> None:
    platform, rng = FakePlatform(), random.Random(SEED)
    wanted = [greedy(str(i), one, 12) for i, one in enumerate(prompts(rng, [1, 3, 15, 16]))]
    with drafting(model, None, FakePlatform()) as (engine, _):
        plain = answers(engine, wanted)
    with nan_in_new_memory(), drafting(model, model, platform, drafter, **options) as (engine, ours):
        assert answers(engine, wanted) == plain
        assert ours.acceptance > 0.97
        assert ours.num_accepted >= len(wanted) * 5


@pytest.mark.parametrize("drafter", [Offering, Holding], ids=["alone", "overlap"])
def test_no_output_changes_whatever_is_asked_for(model: Path, sibling: Path, drafter: type[Offering]) -> None:
    """Drawn with seeds, penalties, biases and log probabilities; beside drafts that are right, and others."""
    print(f"seed {SEED}")
    rng, overlap = random.Random(SEED), {"async_scheduling": drafter is Holding}
    wanted = requests(rng, [KINDS[0], KINDS[1], KINDS[4], KINDS[2]], 12)
    with drafting(model, None, FakePlatform()) as (engine, _):
        plain = answers(engine, wanted)
    with drafting(model, sibling, FakePlatform(), drafter, **overlap) as (engine, ours):
        assert_same(plain, answers(engine, wanted), is_exact=False)
        assert ours.num_drafts > 5
        assert ours.acceptance < 1.0, "wrong drafts are among them"


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_drafts_go_on_behind_the_last_token_that_counts(model: Path, options: dict[str, Any]) -> None:
    """Behind wrong drafts, and behind steps that were not drafted for, all that is not spoiled stays right."""
    print(f"seed {SEED}")
    wanted = [greedy(str(i), one, 30) for i, one in enumerate(prompts(random.Random(SEED), [5, 17]))]
    with drafting(model, None, FakePlatform()) as (engine, _):
        plain = answers(engine, wanted)
    with nan_in_new_memory(), drafting(model, model, FakePlatform(), Moody, **options) as (engine, ours):
        assert answers(engine, wanted) == plain
        assert isinstance(ours, Moody)
        assert ours.surprises == []
        assert ours.num_unused > 2
        assert 5 < ours.num_accepted < ours.num_drafts


def test_its_own_drafts_stay_right_behind_prefixes_and_preemptions(model: Path) -> None:
    """Each turn finds the KV of both models that the one before has left; two at a time are too many for the pages."""
    print(f"seed {SEED}")
    tight = {"num_pages": 11, "max_model_len": 40, "admission": "optimistic", "num_tokens": 5}
    texts = prompts(random.Random(SEED), [14, 9])
    with drafting(model, model, FakePlatform(), **tight) as (engine, ours):
        for turn in range(2):
            outputs = run(engine, [greedy(f"{turn}, {number}", text, 10) for number, text in enumerate(texts)])
            told = list(outputs.values())
            assert turn == 0 or any(own[-1].num_cached_tokens >= 8 for own in told)
            texts = [
                [*text, *(id for one in own for id in one.token_ids)] for text, own in zip(texts, told, strict=True)
            ]
        assert engine.stats().num_preemptions > 0
        assert ours.acceptance > 0.97
        assert ours.num_accepted >= 12


def test_what_its_pages_hold_changes_acceptance_and_no_token(model: Path) -> None:
    print(f"seed {SEED}")
    text = prompts(random.Random(SEED), [30])[0]
    wanted = [greedy(str(number), [*text, number], 10) for number in range(3)]
    with drafting(model, None, FakePlatform()) as (engine, _):
        plain = answers(engine, wanted)
    with drafting(model, model, FakePlatform()) as (engine, ours):
        run(engine, [greedy("first", text, 1)])
        for tensor in tensors_of(drafts_of(engine)._attention.kv):
            tensor.normal_(std=3.0)
        assert answers(engine, wanted) == plain
        assert ours.acceptance < 0.9, "the drafts did depend on them"


def test_the_host_waits_once_a_step_and_all_passes_are_replayed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one row drafted for there is nothing to run besides the graph, once the prompt has been."""
    platform = FakePlatform()
    with drafting(model, model, platform) as (engine, ours):
        num_graphs = len(drafts_of(engine)._graphs._graphs)
        assert num_graphs == 7, "of 1, 2 and 3 rows with 1 and with 4 tokens, and of 1 row with 33"
        engine.add(greedy("one", [1, 2, 3], 13))
        engine.step()
        monkeypatch.setattr(DeviceDrafts, "_known_batch", None)  # is not called
        waits, replays, steps = len(platform.host_waits), platform.replays, engine.stats().step
        while engine.has_work:
            engine.step()
        steps = engine.stats().step - steps
        assert steps == 3, "each brings three drafts and one token more"
        results = set(map(id, platform.host_waits[waits:]))
        assert steps <= len(results) <= steps + 3
        # A replay of the step, and one of all that is drafted behind it; nothing behind the last one.
        assert platform.replays - replays == 2 * steps - 1
    assert ours.acceptance == 1.0
