import os
import socket
import threading

import numpy as np
import pytest

from tests.engine.transfer.remote.pair import (
    PAGE_SIZE,
    Pair,
    random_pages,
    running_pair,
    same_pages,
    soon,
    storing,
    zero_pages,
)
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.transfer.host_pages import HostPages
from tokenmill.engine.transfer.remote import transports
from tokenmill.engine.transfer.remote.channel import PagesRefused, TransferError
from tokenmill.engine.transfer.remote.messages import Handle, PageFormat
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import Secret

HANDLE = Handle("engine-1", "request-1", "nonce")
PLANES = ["stream", "window"]


@pytest.fixture(params=PLANES)
def pair(request, rng, tmp_path):
    with running_pair(rng, request.param, tmp_path) as running:
        yield running


def held(pair: Pair, rng: np.random.Generator, count: int, handle: Handle = HANDLE):
    """Pages in no order on lease, and their tokens."""
    pages = [int(page) for page in rng.permutation(40)[:count]]
    tokens = rng.integers(0, 1 << 20, count * PAGE_SIZE).astype(np.int32)
    pair.grant(handle, pages, tokens)
    return pages, tokens


def test_pages_arrive_as_they_were(pair, rng, monkeypatch):
    monkeypatch.setattr(transports, "CHUNK_BYTES", 3 * pair.memory.page_bytes)  # more chunks than a window has slots
    pages, tokens = held(pair, rng, 29)
    ours = zero_pages(pair.parts, 64)
    memory, client = HostPages(ours), pair.connect()
    own = [int(page) for page in rng.permutation(64)[:29]]
    taken: list[int] = []
    for first, count in [(0, 1), (1, 17), (18, 11)]:
        ask = pair.ask(HANDLE, tokens, first, count)
        client.fetch(ask, storing(memory, own[first : first + count], taken), soon())
    assert taken == own
    assert same_pages(pair.parts, pages, ours, own)
    untouched = sorted(set(range(64)) - set(own))
    assert not any(part[:, untouched].any() for part in ours)


def test_a_page_that_changes_on_its_way_is_found_out(pair, rng, monkeypatch):
    pages, tokens = held(pair, rng, 9)
    ours = zero_pages(pair.parts, 9)
    memory, client = HostPages(ours), pair.connect()
    copied = memory.copy_in

    def spoil(some: list[int], data: memoryview) -> list[int]:
        copied(some, data)
        if 5 in some:
            ours[1][2, 5, 0, 3] += 1
        return memory.checksums(some)

    monkeypatch.setattr(memory, "copy_in", spoil)
    taken: list[int] = []
    with pytest.raises(TransferError, match="page 5 is not what it was"):
        client.fetch(pair.ask(HANDLE, tokens, 0, 9), storing(memory, list(range(9)), taken), soon())
    assert taken == [0, 1, 2, 3, 4]
    assert same_pages(pair.parts, pages[:5], ours, taken)


def test_a_handle_gives_the_pages_of_its_own_tokens_only(pair, rng):
    _, tokens = held(pair, rng, 9)
    client, nowhere = pair.connect(), storing(HostPages(zero_pages(pair.parts, 9)), list(range(9)))
    other = tokens.copy()
    other[40] += 1
    refused = [
        (pair.ask(HANDLE, other, 0, 3), "those of another prompt"),
        (pair.ask(HANDLE, tokens, 5, 5), "9 are held"),
        (pair.ask(Handle("engine-1", "request-1", "guess"), tokens, 0, 3), "no pages are held"),
        (pair.ask(Handle("engine-2", "request-1", "nonce"), tokens, 0, 3), "no pages are held"),
    ]
    for ask, why in refused:
        with pytest.raises(PagesRefused, match=why):
            client.fetch(ask, nowhere, soon())
    # A refusal ends nothing: what comes before the difference is the same prompt.
    client.fetch(pair.ask(HANDLE, other, 0, 2), nowhere, soon())


def test_whoever_does_not_know_the_secret_gets_nothing(pair):
    with pytest.raises(TransferError, match=r"closed the connection|connection broke"):
        pair.connect(Secret(b"another secret, just as long"))


def test_a_producer_that_does_not_know_the_secret_is_not_believed(pair, rng):
    class Liar(Secret):
        """Takes any proof, and has none."""

        def is_proof(self, *_):
            return True

    pair.server._producer = type(pair.server._producer)(
        "engine-1",
        pair.format,
        Liar(b"not the secret of the others"),
        pair.leases,
        pair.memory.copy_out,
        pair.server._producer.senders,
    )
    pair.server._producers = dict.fromkeys(pair.server._producers, pair.server._producer)
    with pytest.raises(TransferError, match="the producer does not know the secret"):
        pair.connect()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("page_size", 32, "pages of 16 tokens, this engine pages of 32 tokens"),
        ("tp_size", 2, "heads cut for 1 ranks, this engine heads cut for 2 ranks"),
        ("pp_size", 2, "layers cut for 1 stages, this engine layers cut for 2 stages"),
        ("layout", "Other", "the KV layout Layout, this engine the KV layout Other"),
        ("fingerprint", "x", "the model and its types as print, this engine the model and its types as x"),
        ("page_bytes", 7, "bytes, this engine pages of 7 bytes"),
    ],
)
def test_unlike_pages_are_refused_by_name(rng, tmp_path, field, value, why):
    with running_pair(rng, "stream", tmp_path) as pair:
        fields = {name: getattr(pair.format, name) for name in PageFormat.__struct_fields__}
        with pytest.raises(TransferError, match=why):
            pair.connect(format=PageFormat(**fields | {field: value}))


def test_strangers_cannot_bring_a_server_down(pair, rng):
    """Odd messages instead of a proof, or after one, end their own connection and nothing else."""
    _, tokens = held(pair, rng, 4)
    for number in range(60):
        length = int(rng.integers(0, 200))
        noise = rng.bytes(length)
        head = [b"", length.to_bytes(4, "big"), b"\xff\xff\xff\xff"][number % 3]
        with pair.server.address.connect(5.0) as stranger:
            stranger.sendall(head + noise)
    client = pair.connect()
    for number in range(20):
        insider = pair.connect()
        noise = rng.bytes(int(rng.integers(1, 100)))
        insider._channel.socket.sendall([b"", len(noise).to_bytes(4, "big")][number % 2] + noise)
        insider.close()
    taken: list[int] = []
    memory = HostPages(zero_pages(pair.parts, 4))
    client.fetch(pair.ask(HANDLE, tokens, 0, 4), storing(memory, list(range(4)), taken), soon())
    assert taken == [0, 1, 2, 3]


def test_a_consumer_that_stops_reading_holds_a_lease_no_longer_than_it_may(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(transports, "CHUNK_BYTES", 1)
    with running_pair(rng, "window", tmp_path, seconds=0.05, most_seconds=0.05) as pair:
        _, tokens = held(pair, rng, 20)
        client = pair.connect()
        client._channel.send(pair.ask(HANDLE, tokens, 0, 20), soon())  # and reads nothing
        stop, ended = soon(), []
        while not ended and soon(0) < stop:
            ended = pair.leases.take_ended()
        assert ended == [0]


def test_a_lease_ends_in_the_middle_of_a_read_and_no_page_is_looked_at_any_more(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(transports, "CHUNK_BYTES", 1)
    with running_pair(rng, "window", tmp_path) as pair:
        pages, tokens = held(pair, rng, 20)
        ours = zero_pages(pair.parts, 20)
        client, taken = pair.connect(), []
        store = storing(HostPages(ours), list(range(20)), taken)

        def store_some(first: int, data: memoryview, checksums: list[int]) -> None:
            store(first, data, checksums)
            if first == 3:
                pair.leases.withdraw(0)
                for part in pair.parts:
                    part[:, pages[12:]] = 0  # they belong to somebody else now

        # Whoever has refused hangs up: a consumer that is about to say something finds that first.
        with pytest.raises(TransferError, match=r"not held any longer|the connection broke"):
            client.fetch(pair.ask(HANDLE, tokens, 0, 20), store_some, soon())
        assert 4 <= len(taken) <= 12  # what was on its way when the lease ended
        assert same_pages(pair.parts, pages[: len(taken)], ours, taken)
        assert len(pair.leases) == 0 and pair.leases.take_ended() == []


def test_a_silent_server_is_given_up_at_the_deadline(rng, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.engine.transfer.remote.client.HANDSHAKE_SECONDS", 0.2)
    with running_pair(rng, "stream", tmp_path) as pair, socket.create_server(("127.0.0.1", 0)) as silent:
        pair.server.address = Address("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(TransferError, match="did not respond in time"):
            pair.connect()
        pair.server.address = Address("127.0.0.1", 1)
        with pytest.raises(TransferError, match=r"no producer answers at tcp://127.0.0.1:1"):
            pair.connect()


def test_a_window_that_may_shrink_is_not_mapped(rng, tmp_path):
    with running_pair(rng, "window", tmp_path) as pair:
        real = transports.WindowSender

        class Unsealed(real):
            def welcomed(self, channel):
                descriptor = os.memfd_create("unsealed")
                os.ftruncate(descriptor, os.fstat(self._descriptor).st_size)
                socket.send_fds(channel.socket, [b"\0"], [descriptor])
                os.close(descriptor)

        pair.server._producer.senders["window"] = lambda: Unsealed(pair.memory.page_bytes)
        with pytest.raises(TransferError, match="may shrink"):
            pair.connect()


def test_a_unix_socket_is_for_its_user_and_replaces_that_of_a_dead_process(tmp_path):
    address = Address.parse(f"unix:{tmp_path}/a.sock")
    dead = address.listen()
    assert os.stat(tmp_path / "a.sock").st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="in use"):
        address.listen()
    dead.close()
    address.listen().close()


@pytest.mark.parametrize("text", ["", "unix:", "127.0.0.1:80", "tcp://:80", "tcp://h:x", "tcp://h:70000", "tcp://h"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(InvalidConfig, match=r"unix:PATH or tcp://HOST:PORT"):
        Address.parse(text)


def test_a_secret_is_read_from_a_file_that_nobody_else_can_read(tmp_path):
    path = tmp_path / "secret"
    for content, mode, why in [
        (b"x" * 32, 0o644, "chmod 600"),
        (b"short", 0o600, "16 to 4096 bytes"),
        (b"x" * 5000, 0o600, "16 to 4096 bytes"),
    ]:
        path.write_bytes(content)
        path.chmod(mode)
        with pytest.raises(InvalidConfig, match=why):
            Secret.read(str(path))
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Secret.read(str(tmp_path / "none"))
    path.write_bytes(b"  " + b"x" * 32 + b"\n")
    assert Secret.read(str(path)).prove("consumer", b"a") == Secret(b"x" * 32).prove("consumer", b"a")


def test_a_proof_of_one_side_is_none_of_the_other():
    secret = Secret(b"x" * 32)
    proof = secret.prove("consumer", b"one", b"two")
    assert secret.is_proof(proof, "consumer", b"one", b"two")
    assert not secret.is_proof(proof, "producer", b"one", b"two")
    assert not secret.is_proof(proof, "consumer", b"onet", b"wo")


def test_connections_are_bounded_and_come_back(rng, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.engine.transfer.remote.server.MOST_CONNECTIONS", 3)
    with running_pair(rng, "stream", tmp_path) as pair:
        clients = [pair.connect() for _ in range(3)]
        with pytest.raises(TransferError):
            pair.connect()
        clients[0].close()
        stop = soon()
        while len(pair.server._channels) == 3 and soon(0) < stop:
            pass
        pair.connect()


def test_many_consumers_at_once(pair, rng):
    wrong: list[int] = []
    expected = [held(pair, rng, 12, Handle("engine-1", f"request-{number}", "n")) for number in range(6)]

    def consume(number: int) -> None:
        ours, own = zero_pages(pair.parts, 12), list(range(12))
        memory, client = HostPages(ours), pair.connect()
        pages, tokens = expected[number]
        for _ in range(10):
            ask = pair.ask(Handle("engine-1", f"request-{number}", "n"), tokens, 0, 12)
            client.fetch(ask, storing(memory, own), soon())
            if not same_pages(pair.parts, pages, ours, own):
                wrong.append(number)

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def crc32c(data: bytes) -> int:
    """Bit by bit, as Castagnoli's polynomial says."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_the_reference_knows_the_check_value_of_crc32c():
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("piece", [1, 7, 8, 100, 191, 192, 193, 1000, 4096])
def test_native_copies_and_checksums_are_those_of_the_reference(rng, piece):
    parts = random_pages(rng, 7, layers=2, piece=piece)
    memory, reference = HostPages(parts), HostPages(parts, is_native=False)
    if memory.checksum != "crc32c":
        pytest.skip("no native kernels were built")
    pages = [int(page) for page in rng.permutation(7)[:4]]
    size = memory.page_bytes
    # One byte further than memory is laid out, so that no vector store is aligned.
    room, plain = bytearray(4 * size + 1), bytearray(4 * size)
    sums = memory.copy_out(pages, memoryview(room)[1:])
    reference.copy_out(pages, memoryview(plain))
    assert room[1:] == plain
    assert sums == memory.checksums(pages) == [crc32c(plain[i * size : (i + 1) * size]) for i in range(4)]
    ours = zero_pages(parts, 9)
    assert HostPages(ours).copy_in([8, 0, 3, 5], memoryview(room)[1:]) == sums
    assert same_pages(parts, pages, ours, [8, 0, 3, 5])
    assert not any(part[:, [1, 2, 4, 6, 7]].any() for part in ours)
    theirs = zero_pages(parts, 9)
    assert HostPages(theirs, is_native=False).copy_in([8, 0, 3, 5], memoryview(plain)) == reference.checksums(pages)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
