"""A draft model beside two devices that share a model: the first alone has it, and no answer changes."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.parallel.devices.counting import RankPlatform
from tests.engine.parallel.devices.test_engine import SMALL, ranks, read_calls
from tests.engine.runner.test_draft_model import Holding, Offering
from tests.engine.runner.test_drafts import KINDS, requests
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same, told
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.kernels.native import load_kernels
from tokenmill.startup.assembly import speculation as speculation_module
from tokenmill.startup.assembly.drafting import find_draft
from tokenmill.startup.assembly.loading import StartupTimer
from tokenmill.startup.assembly.setup import build_engine

pytestmark = [
    pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here"),
    pytest.mark.skipif(DEVICE != "cpu", reason="interpreted"),
]

SEED = seed_for(__name__)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    print(f"seed {SEED}")
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=SEED, num_hidden_layers=1)


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model over the same tokens that two ranks could not share; what it drafts is as good as chance."""
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    return make_checkpoint(tmp_path_factory.mktemp("sibling"), "qwen3", seed=SEED + 1, **shape)


def drafting(model: Path, draft: Path, **options: Any) -> EngineConfig:
    chosen = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    given = {**SMALL, "speculative_config": json.dumps(chosen), **options}
    return EngineConfig(model=str(model), **given).resolve()


@contextmanager
def unmeasured() -> Iterator[None]:
    """Engines that do not measure what interpreted steps cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation_module, "measure_step_costs", lambda make_engine: [])
        yield


def drafted(engine: Engine, wanted: list[AddRequest], drafter: type[Offering]) -> tuple[list[Any], Offering]:
    """The record of requests for which every draft is run, and what became of the drafts."""
    ours = drafter()
    engine.scheduler.state.drafters = (ours,)
    outputs = run(engine, wanted)
    return [told(outputs[request.id]) for request in wanted], ours


# Whether drafts are right, and how steps run: with overlap in graphs as well.
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "right, graphs": (True, {"async_scheduling": False}),
    "wrong, overlap": (False, {"async_scheduling": True}),
    "right, eager": (True, {"async_scheduling": False, "enforce_eager": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_devices_draft_as_one_does(case: str, model: Path, sibling: Path, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    is_right, options = CASES[case]
    drafter = Holding if options["async_scheduling"] else Offering
    config = drafting(model, model if is_right else sibling, **options)
    kinds = [KINDS[0]] * 3 if is_right else [KINDS[0], KINDS[1], KINDS[4]]
    wanted = requests(random.Random(SEED), kinds, 7)
    with unmeasured():
        engine = build_engine(config, platform=RankPlatform()).engine
        try:
            alone, one = drafted(engine, wanted, drafter)
        finally:
            engine.close()
        with ranks(config, tmp_path) as (engine, platform, _):
            graphs = engine.executor._executor.runner.draft_model._graphs._graphs  # type: ignore[attr-defined]
            replays = platform.replays
            both, two = drafted(engine, wanted, drafter)
            assert bool(graphs) == (platform.replays > replays) == ("enforce_eager" not in options)
    assert_same(alone, both, is_exact=False)
    assert (two.num_drafts, two.num_accepted) == (one.num_drafts, one.num_accepted)
    assert two.num_drafts > 5
    assert (two.acceptance > 0.97) == is_right
    assert read_calls(tmp_path, 1) == platform.calls, "what one rank does alone calls nobody"


def num_pages(config: EngineConfig, folder: Path) -> int:
    with unmeasured(), ranks(config, folder) as (engine, _, _):
        outputs = run(engine, requests(random.Random(SEED), [KINDS[0]], 4))["0"]
        assert outputs[-1].finish_reason
        return engine.stats().num_pages


def test_pages_are_as_many_as_fit_beside_the_draft_model(model: Path, sibling: Path, tmp_path: Path) -> None:
    """Three key heads on the first rank alone, beside half of the model's two on each."""
    sizes = {"num_pages": None, "kv_cache_memory_bytes": 60_000}
    with_draft = drafting(model, sibling, **sizes)
    without = dataclasses.replace(with_draft, speculative_config=None)
    found = []
    for name, config in (("with", with_draft), ("without", without)):
        (tmp_path / name).mkdir()
        found.append(num_pages(config, tmp_path / name))
    page = 2 * 4 * 16 * 4  # keys and values of 4 tokens and a head of 16, in float32
    assert found[0] == 60_000 // (page * (1 + 3)) - 1
    assert found[1] == 60_000 // page - 1


def test_memory_is_measured_beside_the_draft_model(model: Path, sibling: Path, tmp_path: Path) -> None:
    assert num_pages(drafting(model, sibling, num_pages=None), tmp_path) > 0


def test_other_ranks_read_no_draft_model(model: Path) -> None:
    config, timer = drafting(model, model, tensor_parallel_size=2), StartupTimer(lambda *_: None)
    assert find_draft(dataclasses.replace(config, rank=1), RankPlatform(), model, 1, timer.phase) is None
    assert timer.seconds == {}
