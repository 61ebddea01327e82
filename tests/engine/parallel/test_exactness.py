"""Two processes bring what one brings: tokens, ends, log probabilities and plans, whatever happens to requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.runner.test_not_numbers import run, running
from tests.engine.runner.told import assert_same, told
from tests.engine.speculation.exactness import FORMATS, MixedDrafter, wishes
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.plan import StepOutcome, StepPlan
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.runner.executor import Executor
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

NUM_REQUESTS = 24
# Family, its shape, and the form of its weights; few pages and rows, so that requests are preempted.
SCENARIOS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "one KV head, bfloat16": ("qwen3", {"num_key_value_heads": 1}, "bfloat16", {}),
    "tied, int8": ("llama", {"hidden_size": 64, "tie_word_embeddings": True}, "int8", {"async_scheduling": True}),
    "four KV heads, int4": ("mistral", {"hidden_size": 64, "num_key_value_heads": 4, "sliding_window": 20}, "int4", {}),
    "experts": ("qwen3_moe", {}, "bfloat16", {"enable_expert_parallel": True}),
    "multipliers, float32": ("granite", {"hidden_size": 64}, "float32", {}),
}
# The same of ranks that share contexts; in float32, too, all products have the shapes of one rank.
CONTEXTS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "context, one KV head, bfloat16": ("qwen3", {"num_key_value_heads": 1}, "bfloat16", {"context_parallel_size": 2}),
    "context of three, windows, int8": (
        "mistral",
        {"hidden_size": 64, "sliding_window": 20},
        "int8",
        {"context_parallel_size": 3, "kv_layout": "page-first"},
    ),
    "context, steps ahead, int4": (
        "llama",
        {"hidden_size": 64},
        "int4",
        {"context_parallel_size": 2, "async_scheduling": True},
    ),
    "context, experts, float32": ("qwen3_moe", {}, "float32", {"context_parallel_size": 2}),
}
# The same over stages, several steps of which run at a time.
STAGES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "two stages, int8": ("qwen3", {}, "int8", {"pipeline_parallel_size": 2}),
    "three stages, bfloat16": (
        "granite",
        {"hidden_size": 64, "num_hidden_layers": 5},
        "bfloat16",
        {"pipeline_parallel_size": 3},
    ),
    "two stages of two ranks, experts": ("qwen3_moe", {}, "bfloat16", {"pipeline_parallel_size": 2}),
}


class Recorder:
    """Notes every plan, and lets another executor run it."""

    def __init__(self, executor: Executor) -> None:
        self.plans: list[tuple[Any, ...]] = []
        self._executor = executor

    def launch(self, plan: StepPlan) -> StepOutcome:
        arrays = (plan.rows, plan.num_computed, plan.num_scheduled, plan.num_samples)
        pages = (plan.page_rows, plan.page_numbers, plan.page_ids)
        drafts = None if plan.draft_ids is None else plan.draft_ids.tolist()
        numbers = tuple(array.tolist() for array in (*arrays, *pages))
        self.plans.append((plan.request_ids, [new.row for new in plan.new_rows], numbers, drafts))
        return self._executor.launch(plan)

    def recover(self) -> None:
        self._executor.recover()

    def close(self) -> None:
        self._executor.close()


def drive(engine: Engine, wanted: list[AddRequest], seed: int) -> tuple[dict[str, list[TokenOutput]], list[Any]]:
    """Requests that come in two waves, of which some are aborted, and sessions that get further turns."""
    rng, outputs = random.Random(seed), {request.id: [] for request in wanted}
    outputs |= {name: [] for name in ("session 0", "session 1")}
    recorder = engine.executor = Recorder(engine.executor)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=9, logprobs=1, ignore_eos=True)
    for name in ("session 0", "session 1"):
        engine.add(AddRequest(id=name, prompt_token_ids=[7, 8, 9], params=params, is_resumable=True))
    waves = {0: wanted[::2], 5: wanted[1::2]}
    ends = {rng.randrange(2, 40): request.id for request in rng.sample(wanted, len(wanted) // 6)}
    turns = {10: ("session 0", False), 14: ("session 1", False), 30: ("session 1", True), 34: ("session 0", True)}
    step = 0
    while step < 60 or engine.has_work:
        for request in waves.get(step, ()):
            engine.add(request)
        for output in engine.abort([ends[step]]) if step in ends else ():
            outputs[output.id].append(output)
        if step in turns:
            name, is_last = turns[step]
            engine.extend(name, [step, 11, 12], params, is_last)
        for output in engine.step():
            outputs[output.id].append(output)
        step += 1
        assert step < 5000, "a drained trace has an end"
    engine.executor = recorder._executor
    return outputs, recorder.plans


@pytest.fixture
def engines(scenario: str, tmp_path: Path) -> Iterator[tuple[Engine, Engine, bool]]:
    """One process, two ranks or more, and whether they must bring the same bits."""
    family, shape, form, options = {**SCENARIOS, **CONTEXTS, **STAGES}[scenario]
    folder = make_checkpoint(tmp_path / "model", family, seed=random.randrange(2**31), **shape)
    # A page of native kernels has 16 tokens, one of torch's 4.
    pages = {"num_pages": 40 if form == "float32" else 20}
    sizes = {"max_model_len": 160, "max_num_batched_tokens": 60, "max_num_seqs": 8, **pages}
    sizes |= {"weight_cache": False, **FORMATS[form], **options}
    alone = {name: value for name, value in sizes.items() if not name.endswith(("_parallel", "_parallel_size"))}
    is_divided = "context_parallel_size" in options or ("pipeline_parallel_size" in options and family != "qwen3_moe")
    ranks = 1 if is_divided else 2
    with running(folder, **alone) as one, running(folder, **sizes, tensor_parallel_size=ranks) as two:
        yield one, two, form != "float32" or "context_parallel_size" in options


@pytest.mark.parametrize("scenario", STAGES)
def test_stages_bring_what_one_process_brings(engines: tuple[Engine, Engine, bool]) -> None:
    """Tokens and log probabilities; the plans are others, since decodes are shared out over the steps."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    wanted = wishes(random.Random(seed), NUM_REQUESTS)
    plain = [request for request in wanted if request.params.grammar is None]
    outputs = both(engines, plain) | {"session 0": [], "session 1": []}
    seen = []
    for engine in engines[:2]:
        drafter = MixedDrafter(outputs, random.Random(seed))
        engine.scheduler.state.drafters = (drafter,)
        seen.append({name: told(own) for name, own in drive(engine, plain, seed)[0].items()})
        engine.scheduler.state.drafters = ()
    num_whole = 0
    for name, want in seen[0].items():
        got, is_cut = seen[1][name], FinishReason.ABORT in (want[0][2], seen[1][name][0][2])
        shorter, longer = sorted((want[0][0], got[0][0]), key=len)
        assert longer[: len(shorter)] == shorter, name
        differing = [(i, a, b) for i, (a, b) in enumerate(zip(want[1], got[1], strict=False)) if a != b]
        assert is_cut or want == got, (name, want[0], got[0], differing[:9], len(want[1]), len(got[1]))
        num_whole += not is_cut
    assert num_whole >= len(plain) // 2
    stats = engines[1].stats()
    assert stats.num_preemptions > 0 and stats.num_accepted_tokens > 0
    both(engines, wanted)


@pytest.mark.parametrize("scenario", [*SCENARIOS, *CONTEXTS])
def test_ranks_bring_what_one_process_brings(engines: tuple[Engine, Engine, bool], scenario: str) -> None:
    one, two, is_exact = engines
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    wanted = wishes(random.Random(seed), NUM_REQUESTS)
    # Masks come when they have been compiled: without them the same calls make the same plans.
    plain = [request for request in wanted if request.params.grammar is None]
    answers = both(engines, plain)
    if is_exact:
        outputs = answers | {"session 0": [], "session 1": []}
        seen = []
        for engine in (one, two):
            drafter = MixedDrafter(outputs, random.Random(seed))
            engine.scheduler.state.drafters = (drafter,)
            brought, plans = drive(engine, plain, seed)
            engine.scheduler.state.drafters = ()
            seen.append(({name: told(own) for name, own in brought.items()}, plans))
        assert seen[0][0] == seen[1][0]
        assert seen[0][1] == seen[1][1]
        stats = [engine.stats() for engine in (one, two)]
        assert stats[0].num_preemptions == stats[1].num_preemptions > 0
        assert stats[0].num_accepted_tokens == stats[1].num_accepted_tokens > 0
    # With masks the steps are others, on whose shapes sums in float32 depend.
    both((one, two, is_exact and "float32" not in scenario), wanted)


def both(engines: tuple[Engine, Engine, bool], wanted: list[AddRequest]) -> dict[str, list[int]]:
    """Check that both engines bring the same; return the tokens of each request."""
    one, two, is_exact = engines
    answers, others = ({name: told(own) for name, own in run(engine, wanted).items()} for engine in (one, two))
    assert_same([answers[request.id] for request in wanted], [others[request.id] for request in wanted], is_exact)
    return {name: answer[0][0] for name, answer in answers.items()}
