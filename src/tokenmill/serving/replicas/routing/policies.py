"""Policies: the engine for a request, from what is known of each. The same calls give the same choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

# What a request is worth besides its prompt, though nothing is known of its output: without it, a prefix that all share
# would have a copy only when hundreds wait for it.
OUTPUT_TOKENS = 32
# As many queued tokens weigh as much as a request in flight. Eight times as many change little in a simulated fleet.
PROMPT_TOKENS = 512


class Candidate(NamedTuple):
    """An engine, as it would be for one request.

    Attributes:
        num_requests: in flight, waiting ones included.
        num_queued_tokens: of their prompts, still to be computed.
        num_missing_tokens: of the new prompt, those that the prefix cache lacks.
    """

    num_requests: int
    num_queued_tokens: int
    num_missing_tokens: int


class RoutingPolicy(Protocol):
    """Chooses among engines.

    Attributes:
        reads_cache: it wants to know what caches have; else nobody keeps track of that.
    """

    reads_cache: bool

    def choose(self, candidates: Mapping[int, Candidate]) -> int:
        """The engine for a request; `candidates` are by the index of the engine, one at least."""
        ...


class _LeastInTurn:
    """The lowest number wins; among equals each in turn."""

    def __init__(self, last: int = -1) -> None:
        """`last`: the turn comes to the engine after this one."""
        self._last = last

    def _least(self, numbers: Mapping[int, int]) -> int:
        self._last = min(numbers, key=lambda engine: (numbers[engine], engine <= self._last, engine))
        return self._last


class FewestInFlight(_LeastInTurn):
    """The engine with the fewest requests in flight."""

    reads_cache = False

    def choose(self, candidates: Mapping[int, Candidate]) -> int:
        """See `RoutingPolicy`."""
        return self._least({engine: one.num_requests for engine, one in candidates.items()})


class LeastCost(_LeastInTurn):
    """The engine with the least work for the request x (1 + load).

    The work is what the engine's cache lacks of the prompt. The load is the requests in flight, and what its queue has
    to compute, in prompts of a middling size (after LMetric, of SGLang's gateway, which counts requests alone). There
    are no thresholds: a prefix stays where it is until others wait there for longer than it takes to compute it
    elsewhere, and then has copies.

    The queue counts in this factor and not beside the work, as an estimate of the time to the first token would have
    it (Mooncake; Qin et al. 2024): with that, a queue anywhere drives prefixes away, whose recomputation makes all
    queues longer. docs/performance.md has the figures. Tokens stand for time: engines of one server have equal shares
    of the machine, so the time of a token would be a common factor.
    """

    reads_cache = True

    def choose(self, candidates: Mapping[int, Candidate]) -> int:
        """See `RoutingPolicy`."""
        return self._least({engine: cost(*one) for engine, one in candidates.items()})


def cost(num_requests: int, num_queued_tokens: int, num_missing_tokens: int) -> int:
    """What `LeastCost` compares; see `Candidate` for the arguments."""
    return (num_missing_tokens + OUTPUT_TOKENS) * (PROMPT_TOKENS * (1 + num_requests) + num_queued_tokens)


def policy_of(name: str, last: int = -1) -> RoutingPolicy:
    """The policy of a name, as `--routing-policy` has it; `last`: the turn comes to the engine after this one."""
    return LeastCost(last) if name == "cost" else FewestInFlight(last)
