"""The memory of a GPU: how fast it is read, and what a step takes of it. Imported where there is one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.config.configs import EngineConfig
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.kernels.triton.splits import PART_EXTRA, count_splits, level_of
from tokenmill.platform.protocol import Platform


def read_device(platform: Platform, size: int) -> Callable[[], None]:
    """Return a function that reads so many bytes of a device's memory once, and waits until that is done."""
    stream = platform.stream()
    values = torch.ones(size // 4, dtype=torch.float32, device=platform.device)
    stream.record().wait()

    def read() -> None:
        with stream:
            values.sum()
        stream.record().wait()

    return read


def workspace_bytes(config: EngineConfig, architecture: Architecture, longest: int, item_bytes: int) -> int:
    """Estimate the memory that a step takes besides weights and KV, before it can be measured.

    It counts the activations of the widest layer and the logits in the sampler's type, twice over, and the partial
    results of split contexts that are joined in the largest graph.

    Args:
        longest: tokens of the longest request. item_bytes: of an activation.
    """
    widest = max(one.mixer.widest + 3 * one.mlp.active_size for one in architecture.layers)
    per_token = 4 * architecture.hidden_size + widest
    logits = config.max_num_seqs * architecture.vocab_size * item_bytes
    part = max(4 * one.num_heads * (one.head_dim + PART_EXTRA) for one in architecture.attentions)
    parts = config.max_num_seqs * int(count_splits(longest, level_of(config.page_size))) * part
    return 2 * (config.step_budget * per_token * item_bytes + logits) + parts
