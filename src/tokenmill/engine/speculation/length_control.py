"""Choose how many draft tokens of which requests to run: the costs of a step against what was right so far.

A step that runs D drafts more brings, of each request, the drafts up to the first wrong one. With s the chance that a
draft and all before it are right, and c(n) the seconds of a step of n tokens, the drafts are chosen that make

    (tokens without drafts + sum of s) / (seconds without drafts + c(T + D) - c(T))

largest, the likeliest first (goodput; Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
Using Goodput", arXiv 2406.14066). Knows no clock: c is a table, and chances come from counts. The same calls give the
same answers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# A gain that is expected must exceed this: estimates err, and drafts cost what no table shows.
_LEAST_GAIN = 1.03
# The weight of the past when a draft has been judged: the last ten or so count.
_DECAY = 0.9
# Where a request begins: drafts are believed to be right three times out of four, as if two had been seen.
_BELIEF, _BELIEF_WEIGHT = 0.75, 2.0
# Part of the way back to that, each time that drafts were not worth their cost: so that they are tried again.
_FORGIVENESS = 1 / 128
# Positions of a draft are told apart up to here: 0, 1, 2 to 3, 4 to 7, and those behind.
_NUM_CLASSES = 5


class StepCosts:
    """Seconds of a step by its number of tokens: a table with straight lines between its sizes and behind the last two.

    Args:
        table: sizes and seconds, sizes growing, two or more. A step is taken to cost no less than a smaller one.
    """

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        assert len(table) >= 2, "a line has two points"
        self._sizes = [size for size, _ in table]
        self._seconds: list[float] = []
        for _, seconds in table:
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0))

    def seconds_of(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens` tokens."""
        sizes, seconds = self._sizes, self._seconds
        right = min(max(1, bisect_left(sizes, num_tokens)), len(sizes) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
        return max(seconds[0], seconds[right] + slope * (num_tokens - sizes[right]))


class Acceptance:
    """Estimates how likely the drafts of one request are right, by their depth.

    A drafter that gives a chance for each token is corrected by what came of such tokens: the ratio of those that were
    right to those that were to be expected.

    Args:
        belief: the ratio before any draft has been judged.
    """

    __slots__ = ("_belief", "_expected", "_right")

    def __init__(self, belief: float = _BELIEF) -> None:
        self._belief = belief
        self._right = [belief * _BELIEF_WEIGHT] * _NUM_CLASSES
        self._expected = [_BELIEF_WEIGHT] * _NUM_CLASSES

    def survival(self, probabilities: Sequence[float]) -> list[float]:
        """Return, for each token of a draft, the chance that it and all before it are right.

        Args:
            probabilities: the drafter's own estimates, each given that those before it are right.
        """
        chances, chance = [], 1.0
        for position, probability in enumerate(probabilities):
            depth = min(position.bit_length(), _NUM_CLASSES - 1)
            chance *= min(0.99, probability * self._right[depth] / self._expected[depth])
            chances.append(chance)
        return chances

    def observe(self, probabilities: Sequence[float], num_accepted: int) -> None:
        """Learn from a draft with these estimates, of which `num_accepted` tokens were right.

        Nothing is known of the tokens behind the first wrong one.
        """
        for position, probability in enumerate(probabilities[: num_accepted + 1]):
            depth = min(position.bit_length(), _NUM_CLASSES - 1)
            self._right[depth] = self._right[depth] * _DECAY + (position < num_accepted)
            self._expected[depth] = self._expected[depth] * _DECAY + probability

    def forgive(self) -> None:
        """Raise the estimates a little when drafts were not worth their cost, so that they are tried again later."""
        for depth in range(_NUM_CLASSES):
            believed = self._belief * self._expected[depth]
            self._right[depth] += max(0.0, believed - self._right[depth]) * _FORGIVENESS


class LengthControl:
    """Chooses which drafts of a step to run."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def pays_at_best(self, num_samples: int, num_tokens: int, most: int) -> bool:
        """Return True if any number of drafts, up to `most`, would pay if all of them were right.

        Args:
            num_samples: tokens that the step brings without drafts.
            num_tokens: tokens that it runs without drafts.
        """
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < most]
        return any(self._gain(num_samples, num_tokens, size, size) > _LEAST_GAIN for size in (*sizes, most))

    def choose(self, survivals: Sequence[Sequence[float]], num_samples: int, num_tokens: int, budget: int) -> list[int]:
        """Choose how many draft tokens of each request to run.

        Args:
            survivals: for each request, for each token of its draft, the chance that it and all before it are right.
            num_samples, num_tokens: see `pays_at_best`.
            budget: most draft tokens of all requests together.
        """
        # Chances fall within a draft, and sorting is stable: the first D of this order are the heads of drafts.
        order = [(-chance, index) for index, survival in enumerate(survivals) for chance in survival]
        order.sort()
        best, best_size, total = _LEAST_GAIN, 0, 0.0
        for size, (chance, _) in enumerate(order[:budget], 1):
            total -= chance
            gain = self._gain(num_samples, num_tokens, total, size)
            if gain > best:
                best, best_size = gain, size
        lengths = [0] * len(survivals)
        for _, index in order[:best_size]:
            lengths[index] += 1
        return lengths

    def _gain(self, num_samples: int, num_tokens: int, accepted: float, num_drafts: int) -> float:
        """Return tokens a second with drafts over tokens a second without, leaving out the cost of prompts."""
        alone = self._costs.seconds_of(num_samples)
        more = self._costs.seconds_of(num_tokens + num_drafts) - self._costs.seconds_of(num_tokens)
        return (num_samples + accepted) / num_samples * alone / (alone + more)
