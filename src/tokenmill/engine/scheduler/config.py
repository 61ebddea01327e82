"""`SchedulerConfig`: the limits and the policies of a scheduler."""

from __future__ import annotations

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.kv.eviction import EVICTION_POLICIES, EvictionPolicy
from tokenmill.engine.scheduler.policies import (
    ADMISSION_POLICIES,
    BATCH_POLICIES,
    QUEUE_POLICIES,
    AdmissionPolicy,
    BatchPolicy,
    QueuePolicy,
    find_policy,
)


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits and policies of a scheduler; most fields are named after command-line flags.

    Attributes:
        policy: `fair`, `fcfs`, `priority` or one of the user's: the order of the queues.
        batch_policy: `mixed`, `decode-first`, `prefill-first` or one of the user's: which requests may share a step.
        admission: `whole-prompt`, `optimistic`, `reserve` or one of the user's: what an admitted request takes at once.
        eviction_policy: `lru`, `lfu`, `slru`, `cost` or one of the user's: what the prefix cache gives up first.
        seed: for requests that bring none.
        num_stages: of the pipeline that runs the steps, several at a time: a request runs again only when its token is
            known, and decodes are shared out over as many steps.
        max_loras: adapters in a step at most; 0: none. lora_patience: steps that a request without a slot is passed
            over before one is freed for it.
        encoder_budget: tokens of images that a step encodes. encoder_cache_tokens: of those whose outputs are kept.
        disable_chunked_mm_input: a step does not end within an image.
        patience: steps between two looks for the oldest request; see `Seniority`. Step logs bear both names.
        state_slots: for recurrent states, of requests that run and of prefixes; 0: the model has none.
        scheduler_cls: the class that decides, see `find_scheduler`; "": `Scheduler`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    policy: str = "fair"
    batch_policy: str = "mixed"
    admission: str = "whole-prompt"
    eviction_policy: str = "lru"
    seed: int = 0
    num_stages: int = 1
    max_loras: int = 0
    lora_patience: int = 64
    encoder_budget: int = 0
    encoder_cache_tokens: int = 0
    disable_chunked_mm_input: bool = False
    state_slots: int = 0
    patience: int = 1024
    scheduler_cls: str = ""

    @property
    def largest_chunk(self) -> int:
        """Most tokens of one request that a step runs."""
        threshold = self.long_prefill_token_threshold if self.enable_chunked_prefill else 0
        return min(threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)


class Policies(msgspec.Struct, frozen=True):
    """The policies that a config names."""

    queue: QueuePolicy
    batch: BatchPolicy
    admission: AdmissionPolicy
    eviction: EvictionPolicy


def find_policies(queue: str, batch: str, admission: str, eviction: str) -> Policies:
    """Return the policies of these names.

    Raises:
        InvalidConfig: a name has no policy.
    """
    return Policies(
        find_policy("--scheduling-policy", queue, QUEUE_POLICIES, QueuePolicy),
        find_policy("--batch-policy", batch, BATCH_POLICIES, BatchPolicy),
        find_policy("--admission", admission, ADMISSION_POLICIES, AdmissionPolicy),
        find_policy("--eviction-policy", eviction, EVICTION_POLICIES, EvictionPolicy),
    )


def policies_of(config: SchedulerConfig) -> Policies:
    """Return the policies that a config names.

    Raises:
        InvalidConfig: a name has no policy.
    """
    return find_policies(config.policy, config.batch_policy, config.admission, config.eviction_policy)


def scheduler_config_of(config: EngineConfig, max_model_len: int, state_slots: int = 0) -> SchedulerConfig:
    """Return the scheduler's part of a config that has been resolved for its device.

    Args:
        state_slots: see `SchedulerConfig`.

    Raises:
        InvalidConfig: without chunked prefill a step must hold the longest prompt.
    """
    if not config.enable_chunked_prefill and config.step_budget < max_model_len:
        raise InvalidConfig(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least the context ({max_model_len})"
        )
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_budget,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        batch_policy=config.batch_policy,
        admission=config.admission,
        eviction_policy=config.eviction_policy,
        seed=config.seed,
        num_stages=config.pipeline_parallel_size,
        max_loras=config.max_loras if config.enable_lora else 0,
        disable_chunked_mm_input=config.disable_chunked_mm_input,
        state_slots=state_slots,
        scheduler_cls=config.scheduler_cls,
    )
