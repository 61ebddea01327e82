"""An engine of stages on devices that do not exist: what clients are told is what one device tells them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.parallel.devices.counting import Call
from tests.engine.parallel.devices.test_engine import (
    SMALL,
    check_killed_rank,
    check_measured_memory,
    drafts_of,
    ranks,
    read_calls,
    tell,
)
from tests.engine.runner.test_drafts import KINDS, requests
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same, told
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.model.kernels.native import load_kernels

pytestmark = [
    pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here"),
    pytest.mark.skipif(DEVICE != "cpu", reason="interpreted"),
]

SEED = seed_for(__name__)
SMALLEST = {"num_key_value_heads": 2, "num_hidden_layers": 2}
TWO = {"pipeline_parallel_size": 2}
# Family, its shape, kinds of requests, options, and how the model is shared.
FEATURES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], dict[str, Any], dict[str, int]]] = {
    # Log probabilities, penalties, reports on prompts, a grammar; more requests than rows.
    "graphs": ("qwen3", SMALLEST, (0, 1, 4, 5, 10), {}, TWO),
    "eager": ("qwen3", {"num_hidden_layers": 3}, (1, 5, 9), {"enforce_eager": True}, {"pipeline_parallel_size": 3}),
    "of two ranks": ("qwen3", SMALLEST, (0, 4, 5, 10), {}, {**TWO, "tensor_parallel_size": 2}),
    "windows": ("gemma3", {}, (0, 3, 9), {}, TWO),
    "experts": ("qwen3_moe", {}, (0, 6), {"enforce_eager": True}, TWO),
    "steps one by one": ("granite", {}, (4, 11), {"async_scheduling": False}, TWO),
    "invariant": ("qwen3", SMALLEST, (0, 4), {"batch_invariant": True, "kernels": "triton"}, TWO),
    "no prefix cache": ("llama", {}, (2, 7), {"enable_prefix_caching": False}, TWO),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_stages_tell_what_one_device_does(feature: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    family, shape, kinds, options, shares = FEATURES[feature]
    rng, folder = random.Random(SEED), make_checkpoint(tmp_path / "model", family, seed=SEED, **shape)
    config = EngineConfig(model=str(folder), **{**SMALL, **options}).resolve()
    wanted = requests(rng, [KINDS[kind] for kind in kinds], 6)
    alone = tell(config, wanted)
    with ranks(config, tmp_path, **shares) as (engine, platform, peers):
        outputs = run(engine, wanted)
        assert_same(alone, [told(outputs[request.id]) for request in wanted], is_exact=False)
        assert (platform.replays > 0) == ("enforce_eager" not in options), "decodes run in graphs"
        drafted = drafts_of(engine, wanted, outputs, rng)
        assert_same(alone, [told(drafted[request.id]) for request in wanted], is_exact=False)
    assert_same_calls([platform.calls, *(read_calls(tmp_path, rank) for rank in range(1, 1 + len(peers)))])


def assert_same_calls(of_ranks: list[dict[str, list[Call]]]) -> None:
    """Ranks of a communicator make the same calls in the same order; of two stages one sends, one receives."""
    for name in {name for calls in of_ranks for name in calls}:
        one, other = (calls[name] for calls in of_ranks if name in calls)
        assert one, f"{name} is used"
        if ".way-" in name:
            assert {call[0] for call in one} ^ {call[0] for call in other} == {"offer", "share"}
            one, other = ([call[1:] for call in calls] for calls in (one, other))
        assert one == other, name


def test_a_step_begins_while_another_is_in_the_next_stage(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3", **SMALLEST)
    config = EngineConfig(model=str(model), **SMALL).resolve()
    wanted = requests(random.Random(SEED), [{"temperature": 0.0}] * 2, 2)
    for number, request in enumerate(wanted):  # each is a step of its own, with an output
        request.prompt_token_ids = [number] * SMALL["max_num_batched_tokens"]
    with ranks(config, tmp_path, **TWO) as (engine, platform, _):
        before = len(platform.order)
        run(engine, wanted)
        assert platform.order[before : before + 3] == ["offer", "offer", "share"]


def test_memory_is_measured_together(tmp_path: Path) -> None:
    check_measured_memory(tmp_path, 3, **TWO)


def test_a_stage_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    check_killed_rank(tmp_path, 2, **TWO)
