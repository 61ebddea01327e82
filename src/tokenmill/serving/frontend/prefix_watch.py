"""Notice when a conversation's prompt differs from its last one in a short span that makes all behind it uncached.

The last prompts of each conversation are kept as token ids, within a bound. A new prompt that goes on with one of them
is as it should be; one that differs from it in a short span, and is equal for long behind that, has lost its prefix to
a block that its client changes. Which KV the engine still has is not known here: see `PrefixWatch.confirm`.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.api_messages import PrefixChange
from tokenmill.serving.frontend.tokenizer import Tokenizer
from tokenmill.serving.frontend.volatile_blocks import UNKNOWN, cause_of

_logger = logging.getLogger(__name__)

# Tokens of the longest span that counts as short, and of the shortest rest that counts as long.
MOST_CHANGED = 512
LEAST_EQUAL = 128
# A prompt ends with what invites the answer, which the next one may have in another form.
_END = 32
# So many equal tokens show where two prompts go on alike.
_WINDOW = 16
_OFFSETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, MOST_CHANGED)
# A client's agents take turns under one name.
_PROMPTS_EACH = 8
_MOST_TOKENS = 2 << 20
_MOST_LOGGED = 256
# Characters around a change that are shown, and of the change itself.
_AROUND, _SHOWN = 40, 120

Ids = npt.NDArray[np.int32]


class PrefixWatch:
    """The last prompts of the conversations of one text worker."""

    def __init__(self, tokenizer: Tokenizer, is_on: bool = True) -> None:
        """`is_on`: there is a prefix cache."""
        self._tokenizer = tokenizer
        self._is_on = is_on
        self._conversations: OrderedDict[str, list[Ids]] = OrderedDict()
        self._num_tokens = 0
        self._logged: set[str] = set()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are kept."""
        return self._num_tokens

    def add(self, conversation: str, prompt: Sequence[int]) -> PrefixChange | None:
        """Keep a prompt of a conversation; return its change from an earlier one that it should have gone on with.

        An empty name: nothing is kept.
        """
        if not (self._is_on and conversation) or len(prompt) < LEAST_EQUAL:
            return None
        new = np.array(prompt, np.int32)
        own = self._conversations.pop(conversation, [])
        earlier, change = self._earlier(own, new)
        if earlier is not None or len(own) >= _PROMPTS_EACH:
            self._num_tokens -= len(own.pop(earlier or 0))
        own.append(new)
        self._num_tokens += len(new)
        self._conversations[conversation] = own
        while self._num_tokens > _MOST_TOKENS and len(self._conversations) > 1:
            self._num_tokens -= sum(map(len, self._conversations.popitem(last=False)[1]))
        return change

    def confirm(self, change: PrefixChange | None, num_cached: int) -> PrefixChange | None:
        """Return the change with the cached tokens, logged once per cause; None if the cache had what is behind it."""
        if change is None or num_cached > change.position:
            return None
        confirmed = msgspec.structs.replace(change, num_cached=num_cached)
        cause = change.cause if change.cause != UNKNOWN else re.sub(r"[0-9a-f]+", "0", change.was[:_AROUND])
        if cause not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(cause)
            _logger.warning(
                "a prompt changed at token %d, so that %d tokens behind it are computed again (%s): %r became %r",
                change.position, change.num_equal, change.cause, change.was, change.now,
            )  # fmt: skip
        return confirmed

    def _earlier(self, own: Sequence[Ids], new: Ids) -> tuple[int | None, PrefixChange | None]:
        """Return which of a conversation's prompts this one follows, None for a new one, and its change from it."""
        commons = [_common(old, new) for old in own]
        for i, old in enumerate(own):
            if commons[i] >= min(len(old), len(new)) - _END:
                return i, None
        for i, old in enumerate(own):
            span = _span(old, new, commons[i])
            if span is not None:
                return i, self._change(old, new, span)
        return None, None

    def _change(self, old: Ids, new: Ids, span: tuple[int, int, int, int]) -> PrefixChange:
        start, old_end, new_end, num_equal = span
        before = self._text(new[max(0, start - _AROUND) : start])[-_AROUND:]
        behind = self._text(new[new_end : new_end + _AROUND])[:_AROUND]
        was, now = self._text(old[start:old_end]), self._text(new[start:new_end])
        # A mark may stand a little further away than what is shown.
        cause = cause_of(self._text(new[max(0, start - 2 * _AROUND) : new_end + _AROUND]) + was)
        return PrefixChange(
            cause=cause,
            position=start,
            num_equal=num_equal,
            was=before + was[:_SHOWN] + behind,
            now=before + now[:_SHOWN] + behind,
        )

    def _text(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _common(old: Ids, new: Ids) -> int:
    """Return how many tokens two prompts begin with alike."""
    least = min(len(old), len(new))
    differ = old[:least] != new[:least]
    return int(differ.argmax()) if differ.any() else least


def _span(old: Ids, new: Ids, start: int) -> tuple[int, int, int, int] | None:
    """Return where two prompts first differ, the end of that span in each, and how many tokens behind it are equal.

    None: the span is not short, or what is behind it is not equal for long.
    """
    reach = new[start : start + 2 * MOST_CHANGED + _WINDOW].tobytes()
    for offset in _OFFSETS:
        window = old[start + offset : start + offset + _WINDOW]
        at = -1 if len(window) < _WINDOW else _find(reach, window)
        if at < 0:
            continue
        old_end, new_end = start + offset, start + at
        while min(old_end, new_end) > start and old[old_end - 1] == new[new_end - 1]:
            old_end, new_end = old_end - 1, new_end - 1
        num_equal = _common(old[old_end:], new[new_end:])
        if num_equal >= LEAST_EQUAL and new_end - start <= MOST_CHANGED:
            return start, old_end, new_end, num_equal
    return None


def _find(reach: bytes, window: Ids) -> int:
    """Return at which token of `reach` a window begins; -1: nowhere."""
    wanted, at = window.tobytes(), -1
    while (at := reach.find(wanted, at + 1)) >= 0:
        if at % window.itemsize == 0:
            return at // window.itemsize
    return -1
