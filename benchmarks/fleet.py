"""A fleet of engines on a virtual clock, behind the real `Router`: Mooncake's shapes of prompts, LRU caches, old reports.

An engine prefills one prompt after the other, what its cache lacks at a rate of its own, and decodes all that are
prefilled at once, each token the slower the more there are. Lengths are 1/16 of the trace's, a page is 1/16 of its 512
tokens. What is not modelled: chunks of prompts beside decodes, preemption, the text workers' own time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.part_messages import EngineReport
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.routing.policies import RoutingPolicy
from tokenmill.routing.prefix_index import PrefixIndex
from tokenmill.routing.reporter import REPORT_INTERVAL
from tokenmill.routing.router import Router

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
    """What a run came to.

    Attributes:
        hit_rate: share of prompt tokens that caches supplied.
        requests, work: of each engine; work is the seconds of its prefills and decodes, each as if it were alone.
        first_token: seconds from the arrival to the first token of each request, ascending.
    """

    hit_rate: float
    requests: list[int]
    work: list[float]
    first_token: list[float]

    @property
    def imbalance(self) -> float:
        """Work of the most loaded engine over that of the least."""
        return max(self.work) / max(min(self.work), 1e-9)


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


def tool_agents(rng: random.Random, num_requests: int, rate: float) -> list[Arrival]:
    """Agents: prompts of tools, few of them used by most, each followed by what is a task's own."""
    prompts = [_tokens(rng, rng.lognormvariate(8.3, 0.6)) for _ in range(60)]
    weights = [1 / (1 + rank) for rank in range(60)]
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
    """One engine: a queue, a batch of decodes, and an LRU cache of pages."""

    def __init__(self, index: int, num_pages: int) -> None:
        self.index = index
        self.num_requests, self.work, self.num_taken = 0, 0.0, 0
        self.queue: deque[tuple[AddRequest, list[int], int]] = deque()
        self.decodes = 0
        self.is_prefilling = False
        self._num_pages = num_pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def find(self, names: Sequence[int]) -> int:
        """How many pages of a prompt are cached."""
        return sum(1 for _ in itertools.takewhile(self._pages.__contains__, names))

    def store(self, names: Sequence[int]) -> list[tuple[bool, list[int]]]:
        """Cache the pages of a prompt, the head of it last: what goes first is an end. Returns the changes."""
        new = [name for name in names if name not in self._pages]
        for name in reversed(names):
            self._pages[name] = None
            self._pages.move_to_end(name)
        gone = [self._pages.popitem(last=False)[0] for _ in range(max(0, len(self._pages) - self._num_pages))]
        return [(True, new), (False, gone)]

    def report(self, changes: list[tuple[bool, list[int]]]) -> EngineReport:
        """As the real one's."""
        queued = sum(request.num_missing_tokens or len(request.prompt_token_ids) for request, _, _ in self.queue)
        return EngineReport(engine=self.index, changes=changes, num_taken=self.num_taken, num_queued_tokens=queued)


@dataclass(slots=True)
class Fleet:
    """Engines behind one router, driven by `run`."""

    policy: RoutingPolicy
    num_engines: int = 8
    num_pages: int = 4000
    _events: list[tuple[float, int, str, object]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Serve a trace."""
        router = Router(range(self.num_engines), self.policy)
        router.begin(PAGE_SIZE, "")
        names = PrefixIndex(PAGE_SIZE, "")
        engines = [SimulatedEngine(index, self.num_pages) for index in range(self.num_engines)]
        hits, waits, now = 0, [], 0.0
        for number, arrival in enumerate(arrivals):
            self._at(arrival.seconds, "arrives", (number, arrival))
        self._at(0.0, "reports", None)
        num_left = len(arrivals)
        while num_left:
            now, _, what, about = heapq.heappop(self._events)
            engine = None
            if what == "arrives":
                number, arrival = about
                request = _request(number, arrival)
                self._prepare(request)
                engine = engines[router.route(request)]
                engine.queue.append((request, names.names_of(request), arrival.num_output_tokens))
                engine.num_requests += 1
                engine.num_taken += 1
            elif what == "prefilled":
                engine, request, pages, num_output_tokens = about
                engine.is_prefilling = False
                engine.decodes += 1
                router.take(engine.report(engine.store(pages)))
                router.ended([TokenOutput(request.id, [1])])
                waits.append(now - arrivals[int(request.id)].seconds)
                seconds = num_output_tokens * DECODE_SECONDS
                engine.work += seconds / DECODES_AT_DOUBLE_TIME
                self._at(now + seconds * (1 + engine.decodes / DECODES_AT_DOUBLE_TIME), "ended", (engine, request))
            elif what == "ended":
                engine, request = about
                engine.decodes -= 1
                num_left -= 1
                router.ended([TokenOutput(request.id, [1], FinishReason.LENGTH)])
            else:
                for one in engines:
                    router.take(one.report([]))
                self._at(now + REPORT_INTERVAL, "reports", None)
            if engine is not None and engine.queue and not engine.is_prefilling and engine.decodes < MAX_RUNNING:
                request, pages, num_output_tokens = engine.queue.popleft()
                found = min(engine.find(pages) * PAGE_SIZE, len(request.prompt_token_ids) - 1)
                hits += found
                seconds = (len(request.prompt_token_ids) - found) * PREFILL_SECONDS
                engine.work += seconds
                engine.is_prefilling = True
                self._at(now + seconds, "prefilled", (engine, request, pages, num_output_tokens))
        total = sum(len(arrival.token_ids) for arrival in arrivals)
        return Outcome(
            hits / total, [one.num_requests for one in engines], [one.work for one in engines], sorted(waits)
        )

    def _prepare(self, request: AddRequest) -> None:
        if hasattr(self.policy, "num_tokens"):
            self.policy.num_tokens = len(request.prompt_token_ids)

    def _at(self, seconds: float, what: str, about: object) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), what, about))


def _tokens(rng: random.Random, unscaled: float) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(max(1, round(min(unscaled, 120_000) / SCALE)))]


def _request(number: int, arrival: Arrival) -> AddRequest:
    return AddRequest(id=str(number), prompt_token_ids=arrival.token_ids, params=_PARAMS)


_PARAMS = SamplingParams()
