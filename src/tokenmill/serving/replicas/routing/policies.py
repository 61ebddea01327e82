"""Policies that choose the engine of a request from its candidates. The same calls give the same choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

# What a request is worth besides its prompt, though nothing is known of its output: without it, a prefix that all share
# would have a copy only when hundreds wait for it.
OUTPUT_TOKENS = 32
# As many queued tokens weigh as much as a request in flight. Eight times as many change little in a simulated fleet.
PROMPT_TOKENS = 512


class Candidate(NamedTuple):
    """An engine's load, and the tokens that it lacks for one request.

    Attributes:
        num_requests: requests in flight, waiting ones included.
        num_queued_tokens: tokens of their prompts that are still to be computed.
        num_missing_tokens: tokens of the new prompt that the prefix cache lacks.
    """

    num_requests: int
    num_queued_tokens: int
    num_missing_tokens: int


class RoutingPolicy(Protocol):
    """Chooses among engines.

    Attributes:
        reads_cache: the policy needs the contents of caches, which are tracked only for it.
    """

    reads_cache: bool

    def choose(self, candidates: Mapping[int, Candidate]) -> int:
        """Return the engine for a request; `candidates`, at least one, are by engine index."""
        ...


class _LeastInTurn:
    """Chooses the engine with the lowest number; among equals, each in turn."""

    def __init__(self, last: int = -1) -> None:
        """`last`: the first turn goes to the engine after this one."""
        self._last = last

    def _least(self, numbers: Mapping[int, int]) -> int:
        self._last = min(numbers, key=lambda engine: (numbers[engine], engine <= self._last, engine))
        return self._last


class FewestInFlight(_LeastInTurn):
    """Chooses the engine with the fewest requests in flight."""

    reads_cache = False

    def choose(self, candidates: Mapping[int, Candidate]) -> int:
        """Return the engine with the fewest requests in flight."""
        return self._least({engine: one.num_requests for engine, one in candidates.items()})


class LeastCost(_LeastInTurn):
    """Chooses the engine with the lowest work for the request x (1 + load).

    The work is the part of the prompt that the engine's cache lacks. The load is the requests in flight plus the
    queued tokens, in prompts of a middling size (after LMetric, of SGLang's gateway, which counts requests alone).
    There are no thresholds: a prefix stays where it is until requests wait there for longer than it takes to compute
    it elsewhere, and then has copies.

    The queue is part of this factor and not added to the work, as in an estimate of the time to the first token
    (Mooncake; Qin et al. 2024): with such a sum, any queue drives prefixes away, and recomputing them makes all queues
    longer. docs/performance.md has the figures. Tokens stand for time: engines of one server have equal shares
    of the machine, so the time of a token would be a common factor.
    """

    reads_cache = True

    def choose(self, candidates: Mapping[int, Candidate]) -> int:
        """Return the engine of the lowest cost."""
        return self._least({engine: cost(*one) for engine, one in candidates.items()})


def cost(num_requests: int, num_queued_tokens: int, num_missing_tokens: int) -> int:
    """Return the cost that `LeastCost` compares; see `Candidate` for the arguments."""
    return (num_missing_tokens + OUTPUT_TOKENS) * (PROMPT_TOKENS * (1 + num_requests) + num_queued_tokens)


def policy_of(name: str, last: int = -1) -> RoutingPolicy:
    """Return the policy of a `--routing-policy` name; `last`: the first turn goes to the engine after this one."""
    return LeastCost(last) if name == "cost" else FewestInFlight(last)
