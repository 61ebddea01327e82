"""`SuffixDrafter`: suffix decoding. What followed the longest earlier context that ends like this text may follow here.

After Oliaro et al., "SuffixDecoding", arXiv 2411.04975, which keeps a suffix tree of bounded depth with a count in each
node: 24 nodes to count for each token, in Python far too slow. Here chains lead to the newest earlier places behind the
same few tokens, those are compared as deep as the tree would be, and the deepest vote.
"""

from __future__ import annotations

from collections.abc import MutableSequence

import numpy as np
import numpy.typing as npt

from tokenmill.core.request import Request
from tokenmill.speculation.drafts import NO_DRAFT, Draft
from tokenmill.speculation.finished_outputs import FinishedOutputs
from tokenmill.speculation.request_text import RequestText

# Lengths of the contexts that have chains; places that are compared.
_LENGTHS = (2, 3, 6)
_MAX_PLACES = 8


class SuffixDrafter:
    """PLACEHOLDER"""

    def __init__(  # noqa: PLR0913 - vLLM's parameters, all named
        self,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_cached_tokens: int = 1_000_000,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> None:
        self._depth = max_tree_depth
        self._min_token_prob = min_token_prob
        self._lengths = tuple(length for length in _LENGTHS if length <= max_tree_depth)
        lengths = range(max_tree_depth + 1)
        # By the length of a match: how many tokens it may propose.
        self._caps = [max(int(max_spec_factor * length + max_spec_offset + 1e-6), 0) for length in lengths]
        equal = np.arange(1, max_tree_depth + max(self._caps) + 1)
        # By votes and then by equal tokens before: how sure those are who all agree, and the products of that so far.
        certainties = [votes / (votes + 1 / equal) for votes in range(_MAX_PLACES + 1)]
        self._certainties = [np.append([1], row).astype(np.float32) for row in certainties]
        self._products = [[1.0, 1.0, *np.cumprod(row).tolist()] for row in certainties]
        self._texts: dict[str, RequestText] = {}
        self._outputs = FinishedOutputs(max_cached_requests, max_cached_tokens, self._lengths)

    def propose(self, request: Request, limit: int) -> Draft:
        """See `TextDrafter`."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = RequestText(self._lengths)
        if not text.take_in(request.token_ids):
            return NO_DRAFT
        end = text.tokens[-self._depth :]
        source: RequestText | FinishedOutputs = text
        length, places = text.longest_context(_MAX_PLACES)
        length, places = _deepest(text.tokens, places, length, end)
        if length < self._depth and not request.cache_key.salt:
            theirs, their_places = self._outputs.longest_context(end, length + 1, _MAX_PLACES)
            if their_places:
                source = self._outputs
                length, places = _deepest(self._outputs.tokens, their_places, theirs, end)
        count = min(self._caps[length], limit)
        if count <= 0 or not places:
            return NO_DRAFT
        return self._vote([source.copy_from(place, count) for place in places], length)

    def forget(self, request: Request) -> None:
        """See `TextDrafter`."""
        self._texts.pop(request.id, None)
        if not request.cache_key.salt:
            self._outputs.add(request.token_ids[request.num_prompt_tokens :])

    def _vote(self, copies: list[list[int]], length: int) -> Draft:
        """Go along with the majority, token by token; of equals, with the newest. All copies agree on what is drafted.

        Args:
            copies: what followed each place, the newest first.
            length: how many tokens before the places are equal.
        """
        token_ids: list[int] = []
        probabilities: list[float] = []
        survival = 1.0
        while copies.count(copies[0]) < len(copies):
            number = len(token_ids)
            votes = [copy[number] for copy in copies if number < len(copy)]
            token_id = max(votes, key=votes.count)
            probability = votes.count(token_id) / (len(copies) + 1 / (length + number))
            survival *= probability
            if survival < self._min_token_prob:
                return _draft(token_ids, np.array(probabilities, dtype=np.float32))
            token_ids.append(token_id)
            probabilities.append(probability)
            copies = [copy for copy in copies if number < len(copy) and copy[number] == token_id]
        rest = self._unanimous(len(copies), length + len(token_ids), len(copies[0]) - len(token_ids), survival)
        if not token_ids:
            return _draft(copies[0][: len(rest)], rest)
        token_ids = copies[0][: len(token_ids) + len(rest)]
        return _draft(token_ids, np.array(probabilities + rest.tolist(), dtype=np.float32))

    def _unanimous(self, votes: int, length: int, count: int, survival: float) -> npt.NDArray[np.float32]:
        """Probabilities of [count] tokens that all places agree on, as far as they are likely enough."""
        products, end = self._products[votes], length + count
        least = self._min_token_prob * products[length] / survival
        while end > length and products[end] < least:
            end -= 1
        return self._certainties[votes][length:end]


def _draft(token_ids: list[int], probabilities: npt.NDArray[np.float32]) -> Draft:
    return Draft(np.array(token_ids, dtype=np.int32), probabilities)


def _deepest(
    tokens: MutableSequence[int], places: list[int], length: int, end: list[int]
) -> tuple[int, list[int]]:
    """Of places behind an equal context of this length those behind the longest; and how long that is."""
    deepest, kept = length, places[:0]
    for place in places:
        # Worth a look only if it is as deep as the deepest; so all of this is one walk backwards, whatever the places.
        if kept and tokens[place - deepest] != end[-deepest]: pass
        depth, most = length, min(len(end), place)
        while depth < most and tokens[place - 1 - depth] == end[-1 - depth]:
            depth += 1
        if depth > deepest:
            deepest, kept = depth, [place]
        elif depth == deepest:
            kept.append(place)
    return deepest, kept
