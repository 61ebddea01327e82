"""The first steps of an engine, before it serves: they set up what first use sets up, and show a lack of memory."""

from __future__ import annotations

from tokenmill.core.errors import OutOfMemory
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.engine import Engine
from tokenmill.platform.protocol import Platform


def warm_up(engine: Engine, platform: Platform) -> None:
    """Run one small request; on an accelerator as much as steps may hold. What a step raises is raised.

    Raises:
        OutOfMemory: the device has too little left for its largest step.
    """
    if not platform.is_accelerator:
        _add(engine, 0, min(8, engine.limits.max_model_len - 2))
        return _run(engine)
    try:
        _run_full_step(engine)
    except Exception as error:
        if not platform.is_out_of_memory(error):
            raise
        budget = engine.scheduler.config.max_num_batched_tokens
        raise OutOfMemory(
            f"no memory is left for a step of {budget} tokens: lower --max-num-batched-tokens, or let the KV cache "
            "leave more (--gpu-memory-utilization)"
        ) from error


def _run_full_step(engine: Engine) -> None:
    """One step of the whole budget, in which every row samples: decodes in half of them, beside prompts."""
    config = engine.scheduler.config
    rows, longest = config.max_num_seqs, max(1, engine.limits.max_model_len - 2)
    for row in range(rows // 2):
        _add(engine, row, 1)
    if rows > 1:
        _step(engine)
    left = config.max_num_batched_tokens - rows
    for row in range(rows // 2, rows):
        more = min(left, longest - 1)
        _add(engine, row, 1 + more)
        left -= more
    _run(engine)


def _add(engine: Engine, number: int, num_tokens: int) -> None:
    """A prompt that shares nothing with the others."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    name = f"warm-up {number}"
    engine.add(AddRequest(id=name, prompt_token_ids=[0] * num_tokens, params=params, cache_salt=name))


def _run(engine: Engine) -> None:
    while engine.has_work:
        _step(engine)


def _step(engine: Engine) -> None:
    """As `Engine.step` does, but for the barrier that keeps an error from those who start the engine."""
    plan = engine.scheduler.schedule()
    assert plan is not None, "all wait for a step, and none runs"
    engine.scheduler.commit(engine.executor.launch(plan).result())
