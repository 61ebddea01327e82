"""A fleet of engines on a virtual clock, behind the real `Router`: prompts of Mooncake's shapes, LRU caches, old news.

An engine prefills one prompt after the other, what its cache lacks at a rate of its own, and decodes all that are
prefilled at once, each token the slower the more there are. Lengths are 1/16 of the trace's, a page is 1/16 of its 512
tokens. What is not modelled: chunks of prompts beside decodes, preemption, the text workers' own time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.part_messages import EngineReport
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.replicas.routing.policies import Candidate, RoutingPolicy
from tokenmill.serving.replicas.routing.prefix_index import PrefixIndex
from tokenmill.serving.replicas.routing.reporter import REPORT_INTERVAL
from tokenmill.serving.replicas.routing.router import Router

PAGE_SIZE = 32
SCALE = 16
PREFILL_SECONDS = 1 / 2000  # of a token
DECODE_SECONDS = 0.01  # of a token, alone on an engine
DECODES_AT_DOUBLE_TIME = 32
MAX_RUNNING = 64
VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    seconds: float
    token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        hit_rate: share of prompt tokens that caches supplied.
        requests, work: of each engine; work is the seconds of its prefills and decodes, each as if it were alone.
        first_token: seconds from the arrival to the first token of each request, ascending.
    """

    hit_rate: float
    requests: Sequence[int]
    work: Sequence[float]
    first_token: list[float]

    @property
    def imbalance(self) -> float:
        """Work of the most loaded engine over that of the least."""
        return max(self.work) / min(self.work)


def conversations(rng: random.Random, num_sessions: int, rate: float) -> list[Arrival]:
    """Chats: a system prompt of a few, a first message of a long-tailed length, and turns that repeat all before them.

    `rate`: sessions that begin in a second.
    """
    systems = [_tokens(rng, 1000) for _ in range(8)]
    arrivals, began = [], 0.0
    for _ in range(num_sessions):
        began += rng.expovariate(rate)
        text = rng.choices(systems, [1 / (1 + rank) for rank in range(8)])[0] + _tokens(
            rng, rng.lognormvariate(8.5, 1.2)
        )
        seconds = began
        while True:
            num_output_tokens = max(1, round(min(1200, rng.lognormvariate(5.34, 1.0)) / SCALE))
            arrivals.append(Arrival(seconds, text, num_output_tokens))
            if rng.random() < 0.55:
                break
            text = text + _tokens(rng, num_output_tokens * SCALE + rng.lognormvariate(6.5, 1.2))
            seconds += rng.expovariate(1 / 30)
    return sorted(arrivals, key=lambda one: one.seconds)


def tool_agents(rng: random.Random, num_requests: int, rate: float, num_prompts: int = 60) -> list[Arrival]:
    """Agents: prompts of tools, few of them used by most, each followed by what is a task's own."""
    prompts = [_tokens(rng, rng.lognormvariate(8.3, 0.6)) for _ in range(num_prompts)]
    weights = [1 / (1 + rank) for rank in range(num_prompts)]
    arrivals, seconds = [], 0.0
    for _ in range(num_requests):
        seconds += rng.expovariate(rate)
        text = rng.choices(prompts, weights)[0] + _tokens(rng, rng.lognormvariate(7.5, 1.0))
        arrivals.append(Arrival(seconds, text, max(1, round(rng.lognormvariate(4.5, 0.8) / SCALE))))
    return arrivals


def infinite_hit_rate(arrivals: Sequence[Arrival]) -> float:
    """Share of prompt tokens that any request before has had in its prompt: no fleet can have more of them cached."""
    seen: set[int] = set()
    index, hits = PrefixIndex(PAGE_SIZE, ""), 0
    for number, arrival in enumerate(arrivals):
        names = index.names_of(_request(number, arrival))
        hits += PAGE_SIZE * sum(1 for _ in itertools.takewhile(seen.__contains__, names))
        seen.update(names)
    return hits / sum(len(arrival.token_ids) for arrival in arrivals)


class SimulatedEngine:
    """A queue, a batch of decodes, and an LRU cache of pages."""

    def __init__(self, index: int, num_pages: int) -> None:
        self.index = index
        self.queue: deque[tuple[AddRequest, list[int], Arrival]] = deque()
        self.num_taken, self.num_decodes, self.work = 0, 0, 0.0
        self.is_prefilling = False
        self._num_pages = num_pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def num_cached_pages(self, names: Sequence[int]) -> int:
        """Count the pages of a prompt that are there, from its start."""
        return sum(1 for _ in itertools.takewhile(self._pages.__contains__, names))

    def store(self, names: Sequence[int]) -> list[tuple[bool, list[int]]]:
        """Cache the pages of a prompt, its head last: what is oldest is always an end. Returns the changes."""
        new = [name for name in names if name not in self._pages]
        for name in reversed(names):
            self._pages[name] = None
            self._pages.move_to_end(name)
        gone = [self._pages.popitem(last=False)[0] for _ in range(len(self._pages) - self._num_pages)]
        return [(True, new), (False, gone)]

    def report(self, changes: list[tuple[bool, list[int]]]) -> EngineReport:
        """As the real one's; the prompt that is being prefilled counts no more."""
        queued = sum(request.num_missing_tokens or len(request.prompt_token_ids) for request, _, _ in self.queue)
        return EngineReport(engine=self.index, changes=changes, num_taken=self.num_taken, num_queued_tokens=queued)


class AtRandom:
    """Any engine."""

    reads_cache = True

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, candidates: Mapping[int, Candidate]) -> int:
        """See `RoutingPolicy`."""
        return self._rng.choice(list(candidates))


class PrefixAffinity:
    """Chooses where most of the prompt is cached, if that is over 0.3 of it and the load is balanced, else the shortest
    queue: the thresholds of SGLang's gateway (64 requests more, and half as many again, are imbalance).
    """

    reads_cache = True
    num_tokens = 0

    def choose(self, candidates: Mapping[int, Candidate]) -> int:
        """See `RoutingPolicy`; `num_tokens` must be those of the prompt."""
        loads = {engine: one.num_requests for engine, one in candidates.items()}
        most, least = max(loads.values()), min(loads.values())
        nearest = min(candidates, key=lambda engine: candidates[engine].num_missing_tokens)
        num_cached = self.num_tokens - candidates[nearest].num_missing_tokens
        is_imbalanced = most - least > 64 and most > 1.5 * least
        return (
            nearest if num_cached > 0.3 * self.num_tokens and not is_imbalanced else min(loads, key=loads.__getitem__)
        )


class Fleet:
    """Engines behind one router. `run` serves a trace; a fleet serves one."""

    def __init__(self, policy: RoutingPolicy, num_engines: int = 8, num_pages: int = 6000) -> None:
        self._policy = policy
        self._router = Router(range(num_engines), policy)
        self._router.begin_routing(PAGE_SIZE, "")
        self._names = PrefixIndex(PAGE_SIZE, "")
        self._engines = [SimulatedEngine(index, num_pages) for index in range(num_engines)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._num_left, self._num_hits, self._now = 0, 0, 0.0
        self._first_token: list[float] = []

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Serve a trace to its end."""
        self._num_left = len(arrivals)
        for number, arrival in enumerate(arrivals):
            self._at(arrival.seconds, self._arrive, number, arrival)
        self._at(0.0, self._report)
        while self._num_left:
            self._now, _, happens, about = heapq.heappop(self._events)
            happens(*about)
        total = sum(len(arrival.token_ids) for arrival in arrivals)
        requests, work = zip(*((engine.num_taken, engine.work) for engine in self._engines), strict=True)
        return Outcome(self._num_hits / total, requests, work, sorted(self._first_token))

    def _arrive(self, number: int, arrival: Arrival) -> None:
        request = _request(number, arrival)
        if isinstance(self._policy, PrefixAffinity):
            self._policy.num_tokens = len(arrival.token_ids)
        engine = self._engines[self._router.route(request)]
        engine.queue.append((request, self._names.names_of(request), arrival))
        engine.num_taken += 1
        self._go_on(engine)

    def _go_on(self, engine: SimulatedEngine) -> None:
        if engine.is_prefilling or not engine.queue or engine.num_decodes >= MAX_RUNNING:
            return
        request, names, arrival = engine.queue.popleft()
        num_cached = min(engine.num_cached_pages(names) * PAGE_SIZE, len(arrival.token_ids) - 1)
        seconds = (len(arrival.token_ids) - num_cached) * PREFILL_SECONDS
        self._num_hits += num_cached
        engine.work += seconds
        engine.is_prefilling = True
        self._at(self._now + seconds, self._decode, engine, request, names, arrival)

    def _decode(self, engine: SimulatedEngine, request: AddRequest, names: Sequence[int], arrival: Arrival) -> None:
        engine.is_prefilling = False
        engine.num_decodes += 1
        self._router.apply_report(engine.report(engine.store(names)))
        self._router.ended([TokenOutput(request.id, [1])])
        self._first_token.append(self._now - arrival.seconds)
        seconds = arrival.num_output_tokens * DECODE_SECONDS
        engine.work += seconds / DECODES_AT_DOUBLE_TIME
        slowed = seconds * (1 + engine.num_decodes / DECODES_AT_DOUBLE_TIME)
        self._at(self._now + slowed, self._end, engine, request)
        self._go_on(engine)

    def _end(self, engine: SimulatedEngine, request: AddRequest) -> None:
        engine.num_decodes -= 1
        self._num_left -= 1
        self._router.ended([TokenOutput(request.id, [1], FinishReason.LENGTH)])
        self._go_on(engine)

    def _report(self) -> None:
        for engine in self._engines:
            self._router.apply_report(engine.report([]))
        self._at(self._now + REPORT_INTERVAL, self._report)

    def _at(self, seconds: float, happens: Callable[..., None], *about: Any) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), happens, about))


def _tokens(rng: random.Random, unscaled: float) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(max(1, round(min(unscaled, 120_000) / SCALE)))]


def _request(number: int, arrival: Arrival) -> AddRequest:
    return AddRequest(id=str(number), prompt_token_ids=arrival.token_ids, params=_PARAMS)


_PARAMS = SamplingParams()
