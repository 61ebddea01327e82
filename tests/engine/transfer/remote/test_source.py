"""`RemoteSource` as the connector calls it: a producer and a consumer in one process, without engines."""

import json
import threading
import time

import numpy as np
import pytest

from tests.engine.transfer.remote.pair import KEY, PAGE_SIZE, random_pages, same_pages, zero_pages
from tests.eventually import eventually
from tokenmill.config.kv_transfer import parse_kv_transfer_config
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import FinishReason
from tokenmill.core.transfers import KVQuery, LoadOrder
from tokenmill.engine.transfer.host_pages import HostPages
from tokenmill.engine.transfer.orders import Movers, PageLoad
from tokenmill.engine.transfer.protocol import KeptPages
from tokenmill.engine.transfer.remote.messages import PageFormat
from tokenmill.engine.transfer.remote.source import RemoteSource

TOKENS = np.arange(4 * PAGE_SIZE, dtype=np.int32)


def make_source(tmp_path, parts, role: str, **extra) -> RemoteSource:
    secret = tmp_path / "secret"
    if not secret.exists():
        secret.touch(0o600)
        secret.write_text("a secret of these tests only")
    socket = str(tmp_path / "pages.sock")
    extra |= {"secret_file": str(secret)}
    extra |= {"socket": socket} if role == "kv_producer" else {"peers": [f"unix:{socket}"]}
    text = {"kv_connector": "TokenMillConnector", "kv_role": role, "kv_connector_extra_config": extra}
    memory = HostPages(parts)
    config = parse_kv_transfer_config(json.dumps(text))
    format = PageFormat("print", "Layout", PAGE_SIZE, memory.page_bytes, checksum=memory.checksum)
    return RemoteSource(config, memory, format)


@pytest.fixture
def parts(rng):
    return random_pages(rng, 30)


@pytest.fixture
def producer(tmp_path, parts):
    source = make_source(tmp_path, parts, "kv_producer")
    yield source
    source.close()


@pytest.fixture
def consumer(tmp_path, parts, producer):
    source = make_source(tmp_path, zero_pages(parts, 30), "kv_consumer")
    yield source
    source.close()


def offered(producer: RemoteSource, pages=(7, 3, 5, 9), kept_id: int = 1) -> dict:
    kept = KeptPages(kept_id, "p", KEY, TOKENS[: len(pages) * PAGE_SIZE], list(pages), FinishReason.LENGTH, None)
    return producer.ended(kept)


def make_load(pages: list[int], first_page: int = 0, told=lambda: None) -> PageLoad:
    order = LoadOrder(1, "c", "remote", first_page, pages, b"")
    return PageLoad(order, KEY, TOKENS[: (first_page + len(pages)) * PAGE_SIZE], Movers(None), told)


def test_what_one_has_the_other_loads(producer, consumer, parts):
    params = offered(producer)
    consumer.arrived("c", params)
    assert consumer.lookup(KVQuery("c", KEY, TOKENS[: 3 * PAGE_SIZE], 0), params).num_tokens == 48
    over = threading.Event()
    load = make_load([20, 21, 22], first_page=1, told=over.set)
    consumer.load(load)
    assert over.wait(20)
    assert load.num_filled == 3
    ours = [np.asarray(part) for part in parts]
    pieces = [consumer._memory.pieces(page) for page in (20, 21, 22)]
    theirs = [HostPages(ours).pieces(page) for page in (3, 5, 9)]
    assert [[bytes(piece) for piece in page] for page in pieces] == [
        [bytes(piece) for piece in page] for page in theirs
    ]
    consumer.forget("c")
    eventually(lambda: list(producer.poll()) == [1])


def test_the_last_of_those_that_share_a_prompt_lets_it_go(producer, consumer):
    params = offered(producer)
    consumer.arrived("c1", params)
    consumer.arrived("c2", params)
    consumer.forget("c1")
    time.sleep(0.3)
    assert list(producer.poll()) == []
    consumer.forget("c2")
    consumer.forget("c2")
    eventually(lambda: list(producer.poll()) == [1])


def test_no_handle_that_a_client_makes_up_is_held_for_ever(producer, consumer):
    params = offered(producer)
    for number in range(3):
        consumer.arrived(f"c{number}", params | {"remote_request_id": f"made up {number}"})
    link = consumer._links.to(consumer._params["c0"].address)
    assert len(link._held) == 3
    for number in range(3):
        consumer.forget(f"c{number}")
    assert not link._held and not consumer._wanted


def test_a_load_that_is_over_fills_nothing(producer, consumer):
    params = offered(producer)
    consumer.arrived("c", params)
    load = make_load([20, 21])
    load.cancel()
    consumer.load(load)
    done = make_load([22], told=(over := threading.Event()).set)
    consumer.load(done)
    assert over.wait(20) and done.num_filled == 1
    assert not any(any(bytes(piece)) for page in (20, 21) for piece in consumer._memory.pieces(page))


def test_a_request_that_was_forgotten_loads_nothing(consumer):
    load = make_load([20], told=(over := threading.Event()).set)
    consumer.load(load)
    assert over.is_set() and load.num_filled == 0


def test_pages_are_kept_for_whom_it_was_asked_and_no_longer(producer):
    query = KVQuery("p", KEY, TOKENS, 0)
    assert producer.lookup(query, {"do_remote_decode": True}).keeps
    assert not producer.lookup(query, {"do_remote_decode": False}).keeps
    assert not producer.lookup(query, None).keeps
    assert offered(producer, pages=(), kept_id=5) is None
    assert list(producer.poll()) == [5]
    offered(producer, kept_id=6)
    producer.expired(6)
    assert list(producer.poll()) == [] and len(producer.leases) == 0


def test_roles_are_kept(producer, consumer):
    with pytest.raises(InvalidRequest, match="do_remote_prefill needs a consumer"):
        producer.arrived("x", offered(producer))
    with pytest.raises(InvalidRequest, match="do_remote_decode needs a producer"):
        consumer.arrived("x", {"do_remote_decode": True})
    with pytest.raises(InvalidRequest, match="knows no producer"):
        consumer.arrived("x", offered(producer) | {"remote_host": "10.0.0.1", "remote_port": 80})
    assert not consumer._params


def test_what_was_loaded_is_what_was_kept(producer, consumer, parts):
    params = offered(producer)
    consumer.arrived("c", params)
    load = make_load([1, 2, 3, 4], told=(over := threading.Event()).set)
    consumer.load(load)
    assert over.wait(20) and load.num_filled == 4
    copy = zero_pages(parts, 30)
    memory, size = HostPages(copy), consumer._memory.page_bytes
    data = bytearray(4 * size)
    consumer._memory.copy_out([1, 2, 3, 4], memoryview(data))
    memory.copy_in([0, 1, 2, 3], memoryview(data))
    assert same_pages(parts, [7, 3, 5, 9], copy, [0, 1, 2, 3])
