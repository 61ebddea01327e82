"""Run the first steps of an engine before it serves: they do the set-up of first use, and show a lack of memory."""

from __future__ import annotations

import msgspec

from tokenmill.core.errors import OutOfMemory
from tokenmill.core.messages import AddRequest
from tokenmill.core.pooling import PoolingParams
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.platform.protocol import Platform

GREEDY = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)


def warm_up(engine: Engine, platform: Platform) -> None:
    """Run one small request, for a vector where the model gives nothing else.

    On an accelerator run decodes together with prompts that fill the budget of a step, and then a request that asks for
    all that sampling offers.

    Every row samples in the full step. Errors of a step are raised.

    Raises:
        OutOfMemory: the device has too little left for its largest step.
    """
    config, longest = engine.scheduler.config, max(1, engine.limits.max_model_len - 2)
    if not platform.is_accelerator:
        return _run(engine, GREEDY, [min(8, longest)])
    num_decodes, left = config.max_num_seqs // 2, config.max_num_batched_tokens - config.max_num_seqs
    prompts = []
    for _ in range(config.max_num_seqs - num_decodes):
        prompts.append(1 + min(left, longest - 1))
        left -= prompts[-1] - 1
    try:
        _run(engine, GREEDY, [1] * num_decodes, prompts)
        # The first decodes beside a text that is pooled, and so in no graph.
        _run(engine, _demanding(engine), [1], [2], pools_last=True)
    except Exception as error:
        if not platform.is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"no memory is left for a step of {config.max_num_batched_tokens} tokens: lower --max-num-batched-tokens, "
            "or let the KV cache leave more (--gpu-memory-utilization)"
        ) from error


def _demanding(engine: Engine) -> SamplingParams:
    """Return parameters that ask for everything that changes logits or reports on them.

    Such rows draw from float32, by kernels of their own: compiled while requests run, these would hold up all streams
    for seconds.
    """
    limits = engine.limits
    free = [token_id for token_id in range(min(128, limits.vocab_size)) if token_id not in limits.eos_token_ids]
    if len(free) < 3:
        return GREEDY
    return SamplingParams(
        max_tokens=2,
        min_tokens=1,
        top_p=0.9,
        frequency_penalty=0.1,
        logit_bias={free[0]: 1.0},
        logprobs=1,
        allowed_token_ids=(free[0], free[1]),
        bad_word_ids=((free[0], free[1]),),
        stop_token_ids=(free[2],),
    )


def _run(engine: Engine, params: SamplingParams, *groups: list[int], pools_last: bool = False) -> None:
    """Run prompts of these lengths that share no prefix, each group a step after the one before.

    Like `Engine.step`, but without its barrier against errors: they reach the caller.

    Args:
        pools_last: the last group is pooled, as all are where the model gives nothing else.
    """
    arriving = list(groups)
    while arriving or engine.has_work:
        is_pooled = not engine.limits.generates or (pools_last and len(arriving) == 1)
        pooling = PoolingParams() if is_pooled else None
        for length in arriving.pop(0) if arriving else ():
            name = f"warm-up {engine.num_arrived}"
            message = AddRequest(id=name, prompt_token_ids=[0] * length, params=params, cache_salt=name)
            engine.add(msgspec.structs.replace(message, pooling=pooling, needs_no_output=pooling is not None))
        _step(engine)


def run_alone(engine: Engine, message: AddRequest) -> None:
    """Run one request to its end; errors of a step are raised."""
    engine.add(message)
    while engine.has_work:
        _step(engine)


def _step(engine: Engine) -> None:
    """Run a step, if there is one to be run."""
    plan = engine.scheduler.schedule()
    assert plan is not None or not engine.has_work, "all wait for a step, and none runs"
    if plan is not None:
        engine.scheduler.commit(engine.executor.launch(plan).result())
