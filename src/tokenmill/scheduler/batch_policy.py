"""What may share a step: two policies, side by side.

Nobody enters a step in which a running request was short of pages, unless the step would be empty: the last request
running may have preempted itself, to find in the cache what it held twice.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.request import Request
from tokenmill.scheduler.step_pass import StepPass

BatchPolicy = Callable[[StepPass], None]


def mixed(step: StepPass) -> None:
    """Prompts and decodes share steps (vLLM V1): running requests first, then as many new ones as fit."""
    if step.advance(lambda request: True) or step.is_empty:
        step.admit()


def prefill_first(step: StepPass) -> None:
    """A step is all prompts, else all decodes (Mini-SGLang): new requests start soonest, decodes wait for them."""
    if step.advance(is_prefilling):
        step.admit()
    if step.is_empty:
        step.advance(lambda request: not is_prefilling(request))
    if step.is_empty:
        step.admit()


def is_prefilling(request: Request) -> bool:
    """True while more than its newest token is left to run."""
    return request.num_uncomputed_tokens > 1


BATCH_POLICIES: dict[str, BatchPolicy] = {"mixed": mixed, "prefill-first": prefill_first}
