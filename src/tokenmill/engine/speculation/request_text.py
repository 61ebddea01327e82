"""`RequestText`: index the tokens of one request as they come, to find where the same few tokens stood before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenmill.core.request import TokenArray

# A context is one number, so many bits for each token; vocabularies are smaller. A larger id would cost drafts only.
_TOKEN_BITS = 24
# A long prompt is taken in piece by piece: no call takes more than some milliseconds.
_TOKENS_PER_CALL = 2048


class _Chains(NamedTuple):
    """The places behind equal contexts of one length.

        tokens   ... 5 9 2 | 7 ... 5 9 2 | 4      behind 5 9 2 there are two places: those of 7 and 4
                             ^------------ link

    Attributes:
        length: length of the contexts, in tokens.
        mask: the bits of such a context.
        heads: by context, the newest place behind it (the first, where `to_first`).
        links: for each place the one before it behind the same context (the first, where `to_first`), or -1.
    """

    length: int
    mask: int
    heads: dict[int, int]
    links: list[int]


class RequestText:
    """Prompt and output of a request, and the places behind equal contexts.

    The place behind the text, where the next token will be, is linked already: its links lead to the earlier places
    behind the same contexts. Only the last token of a text can change: a session loses it when it gets further input
    (`Request.extend`). Then the place behind it is the newest of its chains, and is taken off again.

    A token takes about 70 bytes and 120 more for each context length.

    Attributes:
        tokens: tokens taken in, [n].
        lengths: lengths of the contexts, ascending.
        to_first: places are linked to the first one behind the same context, not to the one before.
    """

    def __init__(self, lengths: Sequence[int], *, to_first: bool = False) -> None:
        self.tokens: list[int] = []
        self.lengths = lengths
        self.to_first = to_first
        self._chains = [_Chains(length, (1 << length * _TOKEN_BITS) - 1, {}, [-1]) for length in lengths]
        # Ones, which are no token, before the text: nothing equals the contexts that begin there.
        self._context = self._chains[-1].mask

    def take_in(self, token_ids: TokenArray) -> bool:
        """Bring the text up to these tokens, [n]. They include all known ones but perhaps the last, unchanged.

        Returns:
            False if there are more tokens than one call takes; the next one goes on.
        """
        known = len(self.tokens)
        fresh: list[int] = token_ids[max(known - 1, 0) : known + _TOKENS_PER_CALL].tolist()
        if known and self.tokens[-1] != fresh[0]:
            self._drop_last()
        elif known:
            del fresh[0]
        self._append(fresh)
        return len(self.tokens) == len(token_ids)

    def _append(self, fresh: list[int]) -> None:
        place, context, longest, to_first = len(self.tokens), self._context, self._chains[-1].mask, self.to_first
        self.tokens.extend(fresh)
        for token_id in fresh:
            context = (context << _TOKEN_BITS | token_id) & longest
            place += 1
            for _, mask, heads, links in self._chains:
                key = context & mask
                links.append(heads.get(key, -1))
                if not to_first or links[-1] < 0:
                    heads[key] = place
        self._context = context

    def _drop_last(self) -> None:
        for _, mask, heads, links in self._chains:
            older = links.pop()
            if older >= 0:
                heads[self._context & mask] = older
            else:
                del heads[self._context & mask]
        self.tokens.pop()
        self._context = self._chains[-1].mask
        for token_id in self.tokens[-self.lengths[-1] :]:
            self._context = self._context << _TOKEN_BITS | token_id

    def longest_context(self, limit: int) -> tuple[int, list[int]]:
        """Find the longest context at the end of the text that stood there before, and the places behind it.

        Returns:
            The length, and at most `limit` places, newest first; 0 and no places if no context did.
        """
        for length, _, _, links in reversed(self._chains):
            place = links[-1]
            if place >= 0:
                places = [place]
                while len(places) < limit and (place := links[place]) >= 0:
                    places.append(place)
                return length, places
        return 0, []

    def copy_from(self, place: int, count: int) -> list[int]:
        """Return `count` tokens from a place on. At the end of the text the copy goes on with itself, as in LZ77."""
        found = self.tokens[place : place + count]
        if len(found) < count:
            found = (found * (count // len(found) + 1))[:count]
        return found
