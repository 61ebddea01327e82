"""`SchedulerConfig`: the limits and the policies of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """See the flags of the same names.

    Attributes:
        policy: `fcfs` or `priority`: the order of the queues.
        batch_policy: `mixed` or `prefill-first`: what may share a step.
        admission: `optimistic` or `reserve`: which pages an admitted request takes at once.
        seed: of requests that bring none.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    batch_policy: str = "mixed"
    admission: str = "optimistic"
    seed: int = 0
