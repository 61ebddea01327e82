"""Changes of logits before a draw: bias, penalties, stop ids before min_tokens, token bitmasks and bad words.

Each part names the rows of the logits that it concerns, so that a row pays only for what it asks for. A part is made on
the host and moves to the device of the logits when it is applied. Presence and frequency penalties follow OpenAI's
definition (over the output), repetition that of CTRL (Keskar et al., 2019) as transformers and vLLM apply it (over
prompt and output); all are computed from the token table at each step: no counts to keep.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

# Stands before a bad word that is shorter than the longest.
PADDING = -1

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """Values to add to single logits: m of them.

    Attributes:
        indices: [m] int64, rows of the logits; no pair with a token occurs twice.
        token_ids: [m] int64.
        values: [m] float32.
    """

    indices: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with a penalty; n of them.

    Attributes:
        indices: [n] int64, rows of the logits.
        rows: [n] int64, rows of the token table.
        num_prompt_tokens, positions: [n] int64; the output so far lies between them.
        presence, frequency, repetition: [n] float32.
    """

    indices: Tensor
    rows: Tensor
    num_prompt_tokens: Tensor
    positions: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """The bad words of the rows of a step; m in all, the longest of 1 + L tokens.

    Attributes:
        indices: [m] int64, rows of the logits.
        rows, positions, num_prompt_tokens: [m] int64, as of `Penalties`.
        heads: [m, L] int64, all tokens of a word but the last, right-aligned behind `PADDING`.
        last: [m] int64, the token that would complete it.
    """

    indices: Tensor
    rows: Tensor
    positions: Tensor
    num_prompt_tokens: Tensor
    heads: Tensor
    last: Tensor


def moved(part: Part, device: torch.device) -> Part:
    """Return a dataclass of tensors on another device."""
    if device.type == "cpu":
        return part
    own: Any = part
    return type(part)(*(getattr(own, field.name).to(device, non_blocking=True) for field in fields(own)))


def add_entries(logits: Tensor, entries: LogitEntries) -> None:
    """Add values to single logits, in place."""
    entries = moved(entries, logits.device)
    logits[entries.indices, entries.token_ids] += entries.values


def apply_penalties(logits: Tensor, penalties: Penalties, token_table: Tensor) -> None:
    """Penalize rows of `logits`, in place.

    Repetition comes first (a positive logit is divided, a negative one multiplied), then frequency and presence.

    Args:
        logits: [S, V] float32.
        token_table: [max_rows, max_len] integers, prompt and output ids of each row; what lies past a row's position
            is not used, whatever it is.
    """
    length = int(penalties.positions.max())
    part = moved(penalties, logits.device)
    rows = part.indices[:, None]
    token_ids = token_table[part.rows, :length].to(torch.int64)
    places = torch.arange(length, device=logits.device)
    is_known = places < part.positions[:, None]
    is_output = is_known & (places >= part.num_prompt_tokens[:, None])
    # The first token of the prompt stands in for what is not known: a token that occurs twice is written twice with
    # the same value, so one more time changes nothing.
    token_ids = token_ids.where(is_known, token_ids[:, :1])

    counts = torch.zeros((len(token_ids), logits.shape[1]), dtype=torch.float32, device=logits.device)
    num_out = counts.scatter_add_(1, token_ids, is_output.to(torch.float32)).gather(1, token_ids)
    values = logits[rows, token_ids]
    factor = part.repetition[:, None]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= part.frequency[:, None] * num_out + part.presence[:, None] * (num_out > 0)
    logits[rows, token_ids] = values


def apply_bad_words(logits: Tensor, words: BadWords, token_table: Tensor) -> None:
    """Subtract infinity from the logits of tokens that would complete a bad word, in place.

    Args:
        logits: [S, V] float32.
        token_table: see `apply_penalties`.
    """
    words = moved(words, logits.device)
    # |<- prompt ->|<- output ... [head of a bad word] ->|<- position: its last token would come here
    places = words.positions[:, None] + torch.arange(-words.heads.shape[1], 0, device=logits.device)
    tokens = token_table[words.rows[:, None], places.clamp(min=0)]
    is_there = (tokens == words.heads) & (places >= words.num_prompt_tokens[:, None])
    completes = (is_there | (words.heads == PADDING)).all(1)
    # Two words may end in the same token, of which only one is about to be completed: so add, do not assign.
    values = torch.where(completes, -torch.inf, 0.0).to(logits.dtype)
    logits.index_put_((words.indices, words.last), values, accumulate=True)
