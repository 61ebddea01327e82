"""Presence, frequency and repetition penalties, computed from the token table at each step: no counts to keep.

Presence and frequency follow OpenAI's definition (over the output), repetition that of CTRL (Keskar et al., 2019) as
transformers and vLLM apply it (over prompt and output).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.sampling.batch import PenaltyGroup


def apply_penalties(logits: Tensor, group: PenaltyGroup, token_table: Tensor) -> None:
    """Penalize the rows of `group` in `logits`, in place.

    Repetition comes first (a positive logit is divided, a negative one multiplied), then frequency and presence.

    Args:
        logits: [S, V] float32.
        token_table: [max_rows, max_len] integers, prompt and output ids of each row; what lies past a row's position
            is not used, whatever it is.
    """
    rows = group.indices[:, None]
    token_ids = token_table[group.table_rows, : group.length].to(torch.int64)
    places = torch.arange(group.length, device=logits.device)
    is_known = places < group.positions[:, None]
    is_output = is_known & (places >= group.num_prompt_tokens[:, None])
    # The first token of the prompt stands in for what is not known: a token that occurs twice is written twice with
    # the same value, so one more time changes nothing.
    token_ids = token_ids.where(is_known, token_ids[:, :1])

    counts = torch.zeros((len(token_ids), logits.shape[1]), dtype=torch.float32, device=logits.device)
    num_out = counts.scatter_add_(1, token_ids, is_output.to(torch.float32)).gather(1, token_ids)
    values = logits[rows, token_ids]
    factor = group.repetition[:, None]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= group.frequency[:, None] * num_out + group.presence[:, None] * (num_out > 0)
    logits[rows, token_ids] = values
