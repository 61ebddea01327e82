"""Changes of logits before a draw: bias, penalties, stop ids before min_tokens, token bitmasks and bad words.

Each part names the rows of the logits that it concerns, so that a row pays only for what it asks for. A part is made of
the host's arrays, and moves to the device of the logits when it is applied. Presence and frequency penalties follow
OpenAI's definition (over the output), repetition that of CTRL (Keskar et al., 2019) as transformers and vLLM apply it
(over prompt and output); all are computed from the token table at each step: no counts to keep.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from tokenmill.platform.arrays import address
from tokenmill.platform.host_arrays import library_of

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array

# Stands before a bad word that is shorter than the longest.
PADDING = -1

Part = TypeVar("Part")


class LogitEntries(msgspec.Struct, frozen=True):
    """Values to add to single logits: m of them.

    Attributes:
        indices: [m] int64, rows of the logits; no pair with a token occurs twice.
        token_ids: [m] int64.
        values: [m] float32.
    """

    indices: Array
    token_ids: Array
    values: Array


class Penalties(msgspec.Struct, frozen=True):
    """Rows with a penalty; n of them.

    Attributes:
        indices: [n] int64, rows of the logits.
        rows: [n] int64, rows of the token table.
        num_prompt_tokens, positions: [n] int64; the output so far lies between them.
        presence, frequency, repetition: [n] float32.
    """

    indices: Array
    rows: Array
    num_prompt_tokens: Array
    positions: Array
    presence: Array
    frequency: Array
    repetition: Array


class BadWords(msgspec.Struct, frozen=True):
    """The bad words of the rows of a step; m in all, the longest of 1 + L tokens.

    Attributes:
        indices: [m] int64, rows of the logits.
        rows, positions, num_prompt_tokens: [m] int64, as of `Penalties`.
        heads: [m, L] int64, all tokens of a word but the last, right-aligned behind `PADDING`.
        last: [m] int64, the token that would complete it.
    """

    indices: Array
    rows: Array
    positions: Array
    num_prompt_tokens: Array
    heads: Array
    last: Array


def moved(part: Part, logits: Array) -> Part:
    """Return a part of the host's arrays where logits are: as it is, or on their device."""
    if isinstance(logits, np.ndarray):
        return part
    own: Any = part
    from_host = library_of(logits).from_host
    return type(part)(*(from_host(array) for array in msgspec.structs.astuple(own)))


@np.errstate(all="ignore")
def add_entries(logits: Array, entries: LogitEntries) -> None:
    """Add values to single logits, in place."""
    entries = moved(entries, logits)
    logits[entries.indices, entries.token_ids] += entries.values


@np.errstate(all="ignore")
def apply_penalties(
    logits: Array, penalties: Penalties, token_table: Array, native: _native.Kernels | None = None
) -> None:
    """Penalize rows of `logits`, in place.

    Repetition comes first (a positive logit is divided, a negative one multiplied), then frequency and presence.

    Args:
        logits: [S, V] float32.
        token_table: [max_rows, max_len] integers, prompt and output ids of each row; what lies past a row's position
            is not used, whatever it is.
        native: kernels of this CPU, for the host's arrays.
    """
    if native is not None:
        _penalize_natively(native, logits, penalties, token_table)
        return
    length = int(penalties.positions.max())
    xp, part = library_of(logits), moved(penalties, logits)
    rows = part.indices[:, None]
    token_ids = xp.astype(token_table[part.rows, :length], "int64")
    places = xp.arange(length, "int64")
    is_known = places < part.positions[:, None]
    is_output = is_known & (places >= part.num_prompt_tokens[:, None])
    # The first token of the prompt stands in for what is not known: a token that occurs twice is written twice with
    # the same value, so one more time changes nothing.
    token_ids = xp.where(is_known, token_ids, token_ids[:, :1])

    num_out = xp.counts(token_ids, is_output, logits.shape[1])
    values = logits[rows, token_ids]
    factor = part.repetition[:, None]
    values = xp.where(values > 0, values / factor, values * factor)
    values -= part.frequency[:, None] * num_out + part.presence[:, None] * (num_out > 0)
    logits[rows, token_ids] = values


def _penalize_natively(native: _native.Kernels, logits: Array, penalties: Penalties, token_table: Array) -> None:
    """Do the same, by native/penalties.cpp."""
    assert logits.dtype == np.float32 and logits.strides[1] == 4, "rows of float32 in one piece"
    assert token_table.dtype == np.int32 and token_table.flags.c_contiguous, "tokens are int32"
    own = penalties
    native.apply_penalties(
        address(logits), logits.strides[0] // 4, len(own.indices),
        address(own.indices), address(own.rows), address(own.num_prompt_tokens), address(own.positions),
        address(own.presence), address(own.frequency), address(own.repetition),
        address(token_table), token_table.shape[1],
    )  # fmt: skip


@np.errstate(all="ignore")
def apply_bad_words(logits: Array, words: BadWords, token_table: Array) -> None:
    """Subtract infinity from the logits of tokens that would complete a bad word, in place.

    Args:
        logits: [S, V] float32.
        token_table: see `apply_penalties`.
    """
    xp, words = library_of(logits), moved(words, logits)
    longest = words.heads.shape[1]
    # |<- prompt ->|<- output ... [head of a bad word] ->|<- position: its last token would come here
    places = words.positions[:, None] + (xp.arange(longest, "int64") - longest)
    tokens = token_table[words.rows[:, None], xp.at_least(places, 0)]
    is_there = (tokens == words.heads) & (places >= words.num_prompt_tokens[:, None])
    completes = (is_there | (words.heads == PADDING)).all(1)
    # Two words may end in the same token, of which only one is about to be completed: so add, do not assign.
    values = xp.astype(xp.where(completes, -math.inf, 0.0), "float32")
    xp.add_at(logits, (words.indices, words.last), values)
