"""A scheduler made in Python behaves as one made by flags."""

from __future__ import annotations

from tokenmill.config.configs import EngineConfig
from tokenmill.engine.scheduler.config import SchedulerConfig


def test_the_defaults_are_those_of_the_flags() -> None:
    flags = EngineConfig(device="cuda").resolve()
    config = SchedulerConfig(flags.max_num_seqs, flags.step_budget)
    # Adapters come with a flag of their own, and the steps of patience with none.
    assert config.max_loras == 0 and not flags.enable_lora
    # Without a model that takes images there is nothing to encode, and without recurrences there are no states.
    others = ("max_loras", "lora_patience", "patience", "encoder_budget", "encoder_cache_tokens", "state_slots")
    for own in (name for name in config.__struct_fields__ if name not in others):
        name = {"policy": "scheduling_policy", "num_stages": "pipeline_parallel_size"}.get(own, own)
        assert getattr(config, own) == getattr(flags, name), own
