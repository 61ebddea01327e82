"""Whisper's rules on marks of time among the words (Radford et al. 2022), as transformers has them.

Marks stand in pairs, the end of a segment and the start of the next; they never go back; the text begins with one of
the first second; and where all marks together are likelier than any single word, one of them comes. Models that write
marks were trained to heed all this, and do not always. On the host alone: models with such marks run there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.sampling_params import TimeRules

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

Floats = npt.NDArray[np.float32]


class TimeMarks(msgspec.Struct, frozen=True):
    """Rows under these rules, n of them, of one model.

    Attributes:
        indices: [n] int64, rows of the logits. rows: [n] int64, rows of the token table.
        num_prompt_tokens, positions: [n] int64; the output so far lies between them.
    """

    rules: TimeRules
    indices: Array
    rows: Array
    num_prompt_tokens: Array
    positions: Array


@np.errstate(all="ignore")
def apply_time_marks(logits: Array, marks: TimeMarks, token_table: Array) -> None:
    """Take from logits [S, V] float32 what the rules do not allow, in place.

    Args:
        token_table: prompt and output ids of each row; what lies past a row's position is not used.
    """
    assert isinstance(logits, np.ndarray), "models with marks of time run on the host"
    begin, end, last_first = marks.rules.begin, marks.rules.end, marks.rules.last_first
    indices, starts, positions = (cast("npt.NDArray[np.int64]", one) for one in _places(marks))
    ids = np.asarray(token_table)[marks.rows, : int(positions.max())]
    places = np.arange(ids.shape[1])
    is_mark = (ids >= begin) & (places >= starts[:, None]) & (places < positions[:, None])
    count, rows = positions - starts, np.arange(len(ids))
    follows = (count >= 1) & is_mark[rows, positions - 1]
    follows_pair = follows & ((count < 2) | is_mark[rows, positions - 2])
    follows_one = follows & ~follows_pair
    latest = np.where(is_mark, ids, 0).max(1)
    # Behind an end the next segment may start at once; no segment is empty.
    least = np.where(latest > 0, latest + ~follows_one, begin)
    tokens = np.arange(logits.shape[1])
    are_marks = tokens >= begin
    barred = are_marks & (follows_pair[:, None] | (tokens < least[:, None]))
    barred |= follows_one[:, None] & (tokens < end)
    barred |= (count == 0)[:, None] & (~are_marks | (tokens > last_first))
    barred[:, begin - 1] = True  # the mark of a text without marks
    own: Floats = np.where(barred, np.float32(-np.inf), logits[indices])
    own[_favours_marks(own, begin), :begin] = -np.inf
    logits[indices] = own


def _places(marks: TimeMarks) -> tuple[Array, Array, Array]:
    return marks.indices, marks.num_prompt_tokens, marks.positions


def _favours_marks(logits: Floats, begin: int) -> npt.NDArray[np.bool_]:
    """Return for each row whether all marks together are likelier than any other token."""
    of_marks = logits[:, begin:]
    largest = of_marks.max(1)
    together = largest + np.log(np.exp(of_marks - largest[:, None]).sum(1))
    favours: npt.NDArray[np.bool_] = together > logits[:, :begin].max(1)
    return favours
