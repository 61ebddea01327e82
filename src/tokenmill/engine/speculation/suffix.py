"""`SuffixDrafter`: suffix decoding. Propose what followed the longest earlier context that ends like this text.

After Oliaro et al., "SuffixDecoding", arXiv 2411.04975. There, trees of bounded depth count every suffix of the text
and of the finished outputs: 24 nodes to count for each token, too slow in Python. Here no count is kept. Chains lead to
the newest places behind the same few tokens; those places are compared as deep as the tree would be, and the deepest
vote. The rule in full:

1.  In the request's own text, take the longest context of 1, 2 or 6 tokens at its end that stood there before, and the
    8 newest places behind it. Of these keep the ones behind the longest equal context, `max_tree_depth` tokens at most.
2.  If that is shorter than 12 tokens, do the same in finished outputs, with contexts of 3 or 6 tokens. They count only
    if their equal context is the longer one.
3.  The places kept say token by token what followed; the majority is the draft, of equals the newest. It ends after
    `max_spec_factor * length of the equal context + max_spec_offset` tokens, or where the estimated probability of all
    of it falls below `min_token_prob`.

The estimate is votes / (voters + 1 / equal tokens before): one place behind 2 equal tokens counts as right in 2 of 3
cases, one behind 24 in 24 of 25. A copy may outrun the text and go on with itself, so repetition is drafted at full
length. Beside the trees this brings as many tokens a step or more where text is copied, and 3% fewer on source code
(benchmarks/drafters.py).
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from tokenmill.core.request import Request
from tokenmill.engine.speculation.drafts import NO_DRAFT, Draft
from tokenmill.engine.speculation.finished_outputs import FinishedOutputs
from tokenmill.engine.speculation.request_text import RequestText

OWN_LENGTHS = (1, 2, 6)
OUTPUT_LENGTHS = (3, 6)
MAX_PLACES = 8
# Who has found so many equal tokens in the own text does not look further.
SURE_LENGTH = 12


class SuffixDrafter:
    """Drafts from the request's own text, and from the outputs of other requests.

    A request with a salt gives nothing to the finished outputs and takes nothing from them: the speed of its answer
    tells no client what others have said. Of a session, the output of its last turn is kept for others.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_cached_tokens: int = 1_000_000,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> None:
        """Take vLLM's parameters, and one of ours.

        Args:
            max_tree_depth: equal tokens that are looked for, at least 6.
            max_cached_requests: finished outputs that are kept; 0: none.
            max_cached_tokens: tokens of all of them, each with one between it and the next; see `FinishedOutputs`.
            max_spec_factor: draft tokens for each equal token.
            max_spec_offset: draft tokens on top of those.
            min_token_prob: probability that a whole draft must have.
        """
        assert max_tree_depth >= OWN_LENGTHS[-1], "the longest context that has chains must fit"
        self._depth = max_tree_depth
        self._min_token_prob = min_token_prob
        lengths = range(max_tree_depth + 1)
        self._max_drafts = [max(int(max_spec_factor * length + max_spec_offset + 1e-6), 0) for length in lengths]
        equal = np.arange(1, max_tree_depth + max(self._max_drafts) + 1)
        # By voters, then by equal tokens before: how sure those are who all agree; and the products of that so far.
        sure = [voters / (voters + 1 / equal) for voters in range(MAX_PLACES + 1)]
        self._sure = [np.append([1], row).astype(np.float32) for row in sure]
        self._products = [[1.0, 1.0, *np.cumprod(row).tolist()] for row in sure]
        self._texts: dict[str, RequestText] = {}
        self._outputs = FinishedOutputs(max_cached_requests, max_cached_tokens, OUTPUT_LENGTHS)

    def propose(self, request: Request, limit: int) -> Draft:
        """Return the majority of what followed the longest earlier contexts, at most `limit` tokens."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = RequestText(OWN_LENGTHS)
        if not text.take_in(request.token_ids):
            return NO_DRAFT
        length, copies = self._look_up(text, limit, is_shared=not request.cache_key.salt)
        return self._vote(copies, length) if copies and copies[0] else NO_DRAFT

    def forget_request(self, request: Request) -> None:
        """Forget a request that has ended, and keep its output for others unless it has a salt."""
        self._texts.pop(request.id, None)
        if not request.cache_key.salt:
            self._outputs.add(request.token_ids[request.num_prompt_tokens :])

    def _look_up(self, text: RequestText, limit: int, is_shared: bool) -> tuple[int, list[list[int]]]:
        """Return the length of the longest equal context and what followed it each time, newest first."""
        end = text.tokens[-self._depth :]
        length, places = text.longest_context(MAX_PLACES)
        length, places = deepest(text.tokens, places, length, end)
        if length < SURE_LENGTH and is_shared:
            other, other_places = self._outputs.longest_context(end, length + 1, MAX_PLACES)
            if other_places:
                other, other_places = deepest(self._outputs.tokens, other_places, other, end)
                count = min(self._max_drafts[other], limit)
                return other, [self._outputs.copy_from(place, count) for place in other_places]
        count = min(self._max_drafts[length], limit)
        return length, [text.copy_from(place, count) for place in places]

    def _vote(self, copies: list[list[int]], length: int) -> Draft:
        """Follow the majority; all copies that are left agree on what is drafted so far."""
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
        number = len(token_ids)
        rest = self._unanimous(len(copies), length + number, len(copies[0]) - number, survival)
        if number:
            rest = np.array(probabilities + rest.tolist(), dtype=np.float32)
        return _draft(copies[0][: len(rest)], rest)

    def _unanimous(self, voters: int, length: int, count: int, survival: float) -> npt.NDArray[np.float32]:
        """Return the probabilities of `count` unanimous tokens, as far as the whole draft is likely enough."""
        products, end = self._products[voters], length + count
        least = self._min_token_prob * products[length] / survival
        while end > length and products[end] < least:
            end -= 1
        return self._sure[voters][length:end]


def _draft(token_ids: list[int], probabilities: npt.NDArray[np.float32]) -> Draft:
    return Draft(np.array(token_ids, dtype=np.int32), probabilities)


def deepest(tokens: list[int] | array[int], places: list[int], length: int, end: list[int]) -> tuple[int, list[int]]:
    """Choose, of places behind an equal context of `length`, those behind the longest one; return its length first.

    Args:
        end: the tokens that a context is compared with, from its last one backwards.
    """
    kept: list[int] = []
    context = tokens[:0]
    for place in places:
        # Only who is as deep as the deepest before is looked at further: all of them together walk back once at most.
        if kept and tokens[place - length : place] != context:
            continue
        depth, most = length, min(len(end), place)
        while depth < most and tokens[place - 1 - depth] == end[-1 - depth]:
            depth += 1
        if depth > length or not kept:
            length, kept, context = depth, [], tokens[place - depth : place]
        kept.append(place)
    return length, kept
