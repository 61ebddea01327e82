"""KV events: the mirror that a subscriber builds from them equals the cache; the wire is vLLM's."""

from __future__ import annotations

import random
import time

import msgspec
import numpy as np
import pytest
import zmq

from tests.engine.scheduler.harness import Harness
from tests.eventually import eventually
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.config.fields import KVEventsConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.request import CacheKey
from tokenmill.engine.kv.events import CacheCleared, KVEventLog, PagesRemoved, PagesStored
from tokenmill.engine.loop.kv_publisher import KVPublisher
from tokenmill.lab.conformance.memory_runner import expected_output

SEED = seed_for(__name__)


class Mirror:
    """A router's knowledge: name of a page -> the tokens up to its end."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}

    def apply(self, events: list) -> None:
        for event in events:
            match event:
                case PagesStored(hashes, parent, tokens, size):
                    prefix = () if parent is None else self.prefixes[parent]
                    for number, name in enumerate(hashes):
                        prefix += tuple(tokens[number * size : (number + 1) * size])
                        self.prefixes[name] = prefix
                case PagesRemoved(hashes):
                    for name in hashes:
                        del self.prefixes[name]
                case CacheCleared():
                    self.prefixes.clear()


def cached_prefixes(harness: Harness) -> set[tuple[int, ...]]:
    """All prefixes of whole pages that the tree holds."""
    found = set()
    size = harness.settings.page_size
    for node in harness.kv.cache.nodes():
        before: tuple[int, ...] = ()
        walk = node.parent
        while walk is not None:
            before = tuple(walk.tokens.tolist()) + before
            walk = walk.parent
        own = tuple(node.tokens.tolist())
        found |= {before + own[:end] for end in range(size, len(own) + 1, size)}
    return found


def test_a_subscriber_that_applies_every_event_mirrors_the_cache() -> None:
    harness = Harness(num_pages=10)
    harness.kv.cache.events = KVEventLog()
    mirror = Mirror()
    generator = random.Random(SEED)
    for number in range(60):
        harness.add([generator.randrange(2) for _ in range(generator.randint(1, 20))], generator.randint(1, 8))
        for _ in range(generator.randint(0, 4)):
            harness.step()
            mirror.apply(harness.engine.take_kv_events())
            assert set(mirror.prefixes.values()) == cached_prefixes(harness), f"seed {SEED}"
        if number % 20 == 19:
            harness.drain()
            harness.engine.reset_prefix_cache()
    harness.drain()
    mirror.apply(harness.engine.take_kv_events())
    assert set(mirror.prefixes.values()) == cached_prefixes(harness)


def test_salts_give_other_names_to_the_same_tokens() -> None:
    harness = Harness()
    harness.kv.cache.events = KVEventLog()
    for salt in ("", "a"):
        harness.add(list(range(8)), max_tokens=1, salt=salt)
        harness.drain()
    first, second = harness.engine.take_kv_events()
    assert first.token_ids == second.token_ids
    assert not set(first.hashes) & set(second.hashes)


def test_a_name_fits_a_signed_64_bit_integer() -> None:
    log = KVEventLog()
    pages = np.arange(1, 61, dtype=np.int32)
    log.stored(CacheKey(""), None, np.arange(120, dtype=np.int32), pages)
    (stored,) = log.take_events()
    assert isinstance(stored, PagesStored)
    assert len(set(stored.hashes)) == 60
    assert all(-(2**63) <= name < 2**63 for name in stored.hashes)
    assert min(stored.hashes) < -(2**60)
    assert max(stored.hashes) > 2**60


def test_a_prefix_has_one_name_however_its_pages_came() -> None:
    names = []
    for prompt_first in (True, False):
        harness = Harness(num_pages=20)
        harness.kv.cache.events = KVEventLog()
        full = [*range(8), *expected_output(list(range(8)), 5)]
        if prompt_first:
            harness.add(list(range(8)), max_tokens=6)  # two pages of a prompt, then one of its output
        else:
            harness.add(full, max_tokens=1)  # three pages at once
        harness.drain()
        stored = [event for event in harness.engine.take_kv_events() if isinstance(event, PagesStored)]
        names.append([name for event in stored for name in event.hashes])
    assert names[0] == names[1]
    assert len(names[0]) == 3


@pytest.fixture
def wire() -> tuple[KVPublisher, zmq.Socket, zmq.Socket]:
    config = KVEventsConfig(
        endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv", buffer_steps=3
    )
    publisher = KVPublisher(config)
    context = zmq.Context()
    subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.REQ)
    subscriber.connect(publisher._pub.getsockopt(zmq.LAST_ENDPOINT))
    subscriber.subscribe("kv")
    asker.close()
    asker = context.socket(zmq.DEALER)
    asker.connect(publisher._replay.getsockopt(zmq.LAST_ENDPOINT))
    # A subscription travels: once it has, what is sent arrives, the last word behind all others.
    eventually(lambda: publisher._pub.send(b"kv is heard") or subscriber.poll(10))
    publisher._pub.send(b"kv at last")
    while subscriber.recv() != b"kv at last":
        pass
    yield publisher, subscriber, asker
    publisher.close()
    context.destroy(linger=0)


def test_events_travel_as_vllm_sends_them(wire: tuple) -> None:
    publisher, subscriber, _ = wire
    publisher.publish([PagesStored([11, -12], None, [1, 2, 3, 4], 2), PagesRemoved([11]), CacheCleared()])
    publisher.publish([])
    publisher.publish([PagesStored([13], -12, [5, 6], 2)])
    batches = []
    for number in range(2):
        assert subscriber.poll(5000)
        topic, sequence, payload = subscriber.recv_multipart()
        assert (topic, int.from_bytes(sequence, "big")) == (b"kv", number)
        batches.append(msgspec.msgpack.decode(payload))
    assert [batch[1] for batch in batches] == [
        [
            ["BlockStored", [11, -12], None, [1, 2, 3, 4], 2, None, "GPU"],
            ["BlockRemoved", [11], "GPU"],
            ["AllBlocksCleared"],
        ],
        [["BlockStored", [13], -12, [5, 6], 2, None, "GPU"]],
    ]
    assert all(abs(batch[0] - time.time()) < 60 for batch in batches)


@pytest.mark.parametrize(("engine", "rest"), [(None, []), (1, [1])])
def test_a_batch_says_of_which_engine_it_is_where_there_are_several(engine: int | None, rest: list[int]) -> None:
    publisher = KVPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*"), engine)
    publisher.publish([CacheCleared()])
    ((_, payload),) = publisher._buffer
    publisher.close()
    assert msgspec.msgpack.decode(payload)[1:] == [[["AllBlocksCleared"]], *rest]


def test_a_subscriber_gets_what_it_missed_as_far_as_it_is_buffered(wire: tuple) -> None:
    publisher, _, asker = wire
    for name in range(5):
        publisher.publish([PagesRemoved([name])])
    for request, expected in ((0, [2, 3, 4]), (4, [4]), (9, [])):
        asker.send_multipart([b"", request.to_bytes(8, "big")])
        asker.send_multipart([b"nonsense"])
        received = []
        while True:
            eventually(lambda: publisher.answer_replays() or asker.poll(10))
            _, number, payload = asker.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                break
            received.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1][0][1]))
        assert received == [(number, [number]) for number in expected]


def test_an_endpoint_in_use_is_one_sentence(wire: tuple) -> None:
    endpoint = wire[0]._pub.getsockopt(zmq.LAST_ENDPOINT).decode()
    with pytest.raises(InvalidConfig, match=r"cannot bind tcp://127\.0\.0\.1:\d+: Address already in use"):
        KVPublisher(KVEventsConfig(endpoint=endpoint))


@pytest.mark.parametrize(
    ("value", "said"),
    [("{", "truncated"), ('{"endpont": "x"}', "endpont"), ('{"publisher": "kafka"}', "Invalid enum value")],
)
def test_a_wrong_config_is_refused_by_name(value: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=f"--kv-events-config: .*{said}"):
        EngineConfig(kv_events_config=value).resolve()
