"""Estimate the memory that a step on a GPU takes besides weights and KV. Imported where there is one: it reads from the
Triton kernels how they split contexts.
"""

from __future__ import annotations

import numpy as np

from tokenmill.config.configs import EngineConfig
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.kernels.triton.splits import PART_EXTRA, SPLIT_ENDS
from tokenmill.startup.sizing.kv_size import wanted_context
from tokenmill.startup.sizing.state_size import BYTES_OF


def workspace_bytes(config: EngineConfig, architecture: Architecture) -> int:
    """Estimate the memory that a step on a GPU takes besides weights and KV, before it can be measured.

    It counts the activations of the widest layer and the logits in the sampler's type, twice over, and the partial
    results of split contexts that are joined in the largest graph.
    """
    item_bytes = BYTES_OF[config.dtype]
    widest = max(one.mixer.widest + 3 * one.mlp.active_size for one in architecture.layers)
    per_token = 4 * architecture.hidden_size + widest
    logits = config.max_num_seqs * architecture.vocab_size * item_bytes
    longest = wanted_context(config, architecture.max_position)
    part = max(4 * one.num_heads * (one.head_dim + PART_EXTRA) for one in architecture.attentions)
    parts = config.max_num_seqs * (int(np.searchsorted(SPLIT_ENDS, longest)) + 1) * part
    return 2 * (config.step_budget * per_token * item_bytes + logits) + parts
