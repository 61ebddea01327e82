"""Greedy tokens of two runs whose sums were added in another order, compared for every seed.

Sums that depend on what else is in a step differ in their last bits, so where two tokens are as likely as each other
within those bits, the runs may choose differently, and from there on they say different things. Whatever else differs
is a fault: a page of others that is read moves logprobs far more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# In nats: by how much logprobs of two runs may differ. A page of 16 other tokens moves them by 0.1 to 1 and more.
BFLOAT16, FLOAT32 = 0.1, 1e-3

Ranked = Mapping[int, float]
Answer = tuple[Sequence[int], Sequence[Ranked]]


def assert_same_but_for_near_ties(one: Answer, other: Answer, within: float, label: object = "") -> bool:
    """Compare the tokens of two greedy answers, and their logprobs as far as the tokens are the same.

    Args:
        one: token ids, and for each the logprobs of the likeliest tokens by id (at least two).
        other: alike.
        within: by how much logprobs of one token may differ: `BFLOAT16`, `FLOAT32`.
        label: said with a failure: which answer this is.

    Returns:
        True if the tokens are the same to the end, False if a near tie parted them.

    Raises:
        AssertionError: they differ otherwise.
    """
    (tokens, ranks), (other_tokens, other_ranks) = one, other
    assert len(tokens) == len(other_tokens) == len(ranks) == len(other_ranks), f"{label}: lengths differ"
    for position, (token, rival) in enumerate(zip(tokens, other_tokens, strict=True)):
        told, other_told = ranks[position], other_ranks[position]
        where = f"{label}: token {position}: {token} of {told}, then {rival} of {other_told}"
        for same in (token, rival):
            assert same in told and same in other_told, f"{where}: {same} is among the likeliest of one run only"
            assert abs(told[same] - other_told[same]) <= within, f"{where}: {same} is not as likely"
        if token != rival:
            gaps = told[token] - told[rival], other_told[rival] - other_told[token]
            # Each logprob may have moved, both ways.
            assert max(gaps) <= 2 * within, f"{where}: no near tie"
            return False
    return True
