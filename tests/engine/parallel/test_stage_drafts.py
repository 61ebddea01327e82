"""A draft model drafts for stages: several steps run at a time, and each request waits for its own drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.seeding import seed_for
from tokenmill import LLM
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.kernels.native import load_kernels
from tokenmill.startup.assembly.step_costs import SIZES

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

# Few rows, so that requests follow each other in them; pages enough, so that drafts are not given up for want of room.
SMALL: dict[str, Any] = {"num_threads": 1, "max_model_len": 128, "page_size": 16, "num_pages": 80, "max_num_seqs": 3}


def answers(model: Path, draft: Path, rng: np.random.Generator, **options: Any) -> tuple[list[list[int]], int, int]:
    """Tokens of eight requests, and how many were drafted and accepted."""
    prompts = [rng.integers(0, 250, int(count)).tolist() for count in rng.integers(1, 40, 8)]
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "seed": 6, "top_p": 0.9}]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kinds[number % 3]) for number in range(8)]
    speculation = json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3})
    with LLM(model=str(model), speculative_config=speculation, **SMALL, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        metrics = {metric.name.partition(":")[2]: metric for metric in llm.get_metrics()}
    counts = [int(metrics[f"spec_decode_num_{what}_tokens"].value) for what in ("draft", "accepted")]
    return [output.outputs[0].token_ids for output in outputs], *counts


@pytest.mark.parametrize("is_right", [True, False])
def test_stages_take_the_drafts_of_a_draft_model(
    is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Costs as this machine has them might say that no draft pays.
    costs = [(size, 1.0 + size / 100) for size in SIZES]
    monkeypatch.setattr("tokenmill.startup.assembly.speculation.measure_step_costs", lambda make_engine: costs)
    seed = seed_for(f"{__name__} {is_right}")
    print(f"seed {seed}")
    model = make_checkpoint(tmp_path / "model", "qwen3", seed=seed, num_hidden_layers=2)
    draft = model if is_right else make_checkpoint(tmp_path / "draft", "qwen3", seed=seed + 1, num_hidden_layers=1)
    alone = answers(model, draft, np.random.default_rng(seed))
    staged = answers(model, draft, np.random.default_rng(seed), pipeline_parallel_size=2)
    assert staged[0] == alone[0]
    assert staged[1] > 0, "drafts are made"
    if is_right:
        assert staged[2] > 0, "and taken"
