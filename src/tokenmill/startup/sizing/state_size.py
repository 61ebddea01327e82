"""Size the recurrent states, which bounds how many requests may run; refuse what does not go with them.

Knows numbers of bytes, no devices.
"""

from __future__ import annotations

import dataclasses

from tokenmill.config.configs import EngineConfig
from tokenmill.config.kv_transfer import own_sources_have
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.sizes import size_text
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.recurrence_spec import DeltaNetSpec, StateSpaceSpec

# Of one request that runs: its own, and what it leaves for the next turn and for others.
STATES_PER_ROW = 4
MAX_NATIVE_KERNEL, NATIVE_HEAD_STEP, MAX_NATIVE_HEAD = 8, 16, 256
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_recurrences(config: EngineConfig, architecture: Architecture) -> None:
    """Refuse sources of the user's own that do not serve recurrent states, if the model has some.

    Raises:
        InvalidConfig: the config names such a source.
    """
    if not architecture.recurrences:
        return
    if not own_sources_have("serves_states", config.kv_source, config.kv_transfer_config):
        raise InvalidConfig(
            f"{architecture.name} has recurrent states, and a source of --kv-source or --kv-transfer-config does not "
            "say serves_states: leave it out"
        )


def check_recurrence_sizes(architecture: Architecture, kernels: str) -> None:
    """Refuse recurrences that these kernels do not have; see native/isa/delta_rule.cpp and short_conv.cpp.

    Raises:
        InvalidConfig: only torch's kernels have them.
    """
    if kernels != "native":
        return
    for spec in architecture.recurrences:
        if not 2 <= spec.kernel <= MAX_NATIVE_KERNEL:
            raise InvalidConfig(f"native kernels have no convolutions of {spec.kernel} tokens; use --kernels torch")
        sizes: dict[int, str] = {}
        if isinstance(spec, DeltaNetSpec):
            sizes = dict.fromkeys((spec.key_size, spec.value_size), "delta rule of heads")
        elif isinstance(spec, StateSpaceSpec):
            sizes = {spec.head_size: "state space of heads", spec.state_size: "state space of states"}
        for size, part in sizes.items():
            if size % NATIVE_HEAD_STEP or size > MAX_NATIVE_HEAD:
                raise InvalidConfig(f"native kernels have no {part} of {size}; use --kernels torch")


def bytes_per_state(config: EngineConfig, architecture: Architecture) -> int:
    """Return the bytes of one request's state; 0: the model has none."""
    return architecture.state_bytes(BYTES_OF[config.dtype])


def states_text(config: EngineConfig, architecture: Architecture) -> str:
    """Return a sentence on the states; "": the model has none."""
    size = bytes_per_state(config, architecture)
    if not size:
        return ""
    least = size_text(STATES_PER_ROW * size)
    return (
        f"\nEach request keeps a recurrent state of {size_text(size)}, whatever its length; with those of prefixes "
        f"(--state-memory) up to {least} for each that runs, and half of what is left at most."
    )


def num_states(config: EngineConfig, architecture: Architecture) -> int:
    """Return the slots that a config has room for, once `with_states` has decided that; 0: the model has no states."""
    size = bytes_per_state(config, architecture)
    return (config.state_memory or 0) // size if size else 0


def with_states(config: EngineConfig, architecture: Architecture, available_bytes: int) -> EngineConfig:
    """Return the config with memory for recurrent states, and with no more rows than states.

    `--state-memory` wins, else half of what KV and states may take together; never more than rows have use for.

    Args:
        available_bytes: free memory of the device.

    Raises:
        InvalidConfig: not even one state fits; says how much memory is needed.
    """
    size = bytes_per_state(config, architecture)
    if not size:
        return config
    assert config.gpu_memory_utilization is not None, "the config is not resolved"
    memory = config.state_memory
    if memory is None:
        num_sharers = config.replica[1] if config.device == "cpu" else 1
        share = int(available_bytes * config.gpu_memory_utilization / num_sharers / 2)
        memory = min(share, STATES_PER_ROW * config.max_num_seqs * size)
    if memory < size:
        raise InvalidConfig(
            f"the state of a request takes {size_text(size)}, and there is room for {size_text(memory)}: raise "
            f"--state-memory to {size} or more"
        )
    slots = memory // size
    return dataclasses.replace(config, state_memory=slots * size, max_num_seqs=min(config.max_num_seqs, slots))
