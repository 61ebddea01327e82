"""Stages find each other and nobody else, hand on what they compute, and hear of each other's end."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.parallel.threads import TIMEOUT, chained
from tokenmill.core.errors import EngineFailed
from tokenmill.engine.parallel.messages import RunPass
from tokenmill.engine.parallel.pipeline.chain import FirstStage, LaterStage, StageListener, connect
from tokenmill.engine.parallel.pipeline.link import Bye, Hello, Join, Launch, Link, Pass, hidden_states
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import Secret
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.sharding.shard import Shard, stage_layers
from tokenmill.model.weights.checkpoint import read_architecture

NOTHING = memoryview(b"")
RUN = RunPass(NOTHING, NOTHING, NOTHING, NOTHING, 0, NOTHING, NOTHING, NOTHING, NOTHING)


def secret(text: str = "0123456789abcdef") -> Secret:
    return Secret(text.encode())


def listener(**how: Secret | None) -> StageListener:
    return StageListener(Address("127.0.0.1"), how.get("secret", secret()), TIMEOUT)


# --- who has which layers ---------------------------------------------------------------------------------------------


def load(architecture: Architecture, stages: list[range]) -> int:
    """Return the bytes that the slowest stage reads in a step."""
    sizes = [layer.num_parameters(architecture.hidden_size) for layer in architecture.layers]
    head = architecture.vocab_size * architecture.hidden_size
    return max(sum(sizes[i] for i in stage) + head * (number == 0) for number, stage in enumerate(stages))


@pytest.mark.parametrize("vocab_size", [300, 3000])
def test_every_layer_is_one_stages_and_no_stage_reads_more_than_it_must(vocab_size: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", tokenizer=False, num_hidden_layers=7, vocab_size=vocab_size)
    architecture = read_architecture(folder)
    for num_stages in range(1, 8):
        stages = stage_layers(architecture, num_stages)
        assert [layer for stage in stages for layer in stage] == list(range(7)) and all(map(len, stages))
        cuts = itertools.combinations(range(1, 7), num_stages - 1)
        choices = [[range(a, b) for a, b in itertools.pairwise((0, *cut, 7))] for cut in cuts]
        assert load(architecture, stages) == min(load(architecture, choice) for choice in choices)


# --- a chain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 4])
def test_what_begins_comes_back_and_what_nobody_waits_for_is_left_out(num_stages: int) -> None:
    rng = torch.Generator().manual_seed(random.randrange(2**31))
    sent = [torch.randint(1000, (rows, 8), generator=rng).float() for rows in (3, 0, 2_000, 5)]
    with chained(num_stages, secret()) as (first, *later):
        assert isinstance(first, FirstStage)
        followers = [threading.Thread(target=follow, args=(stage, 10 + number)) for number, stage in enumerate(later)]
        for thread in followers:
            thread.start()
        assert first.agree(13, TIMEOUT) == 10
        numbers = [first.begin_pass(RUN, hidden) for hidden in sent]
        for number, hidden in list(zip(numbers, sent, strict=True))[1:]:
            assert torch.equal(first.outputs(number, hidden), hidden + num_stages - 1)
        first.send_end()
        for thread in followers:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a stage has not heard of the end"


def follow(stage: LaterStage, count: int) -> None:
    """Add one to whatever comes, until the end."""
    assert stage.agree(count, TIMEOUT) == 10
    while not isinstance(received := stage.receive(TIMEOUT), Bye):
        assert received is not None, "nothing has come"
        begun, numbers = received
        stage.hand_on(begun, hidden_states(numbers, np.zeros(0, np.float32), 8) + 1)
    stage.send_end()


def hand_on_for_ever(stage: LaterStage, hidden: torch.Tensor) -> None:
    while True:
        stage.hand_on(Pass(1, RUN), hidden)


def test_both_ends_may_send_more_than_the_system_holds_before_they_read() -> None:
    hidden = torch.zeros(4 << 20, 1)
    with chained(2) as (first, later):
        assert isinstance(first, FirstStage) and isinstance(later, LaterStage)
        first.begin_pass(RUN, hidden)
        later.hand_on(Pass(1, RUN), hidden)
        assert len(first.outputs(1, hidden)) == 4 << 20
        received = later.receive(TIMEOUT)
        assert isinstance(received, tuple) and len(received[1]) == 16 << 20


def test_a_stage_that_is_gone_ends_all_and_one_that_gives_up_says_why() -> None:
    with chained(4) as (first, one, two, three):
        assert isinstance(first, FirstStage) and isinstance(two, LaterStage)
        assert isinstance(one, LaterStage) and isinstance(three, LaterStage)
        two.close()
        with pytest.raises(EngineFailed, match="stage 2 is gone"):
            hand_on_for_ever(one, torch.zeros(8))
        with pytest.raises(EngineFailed, match="stage 2 is gone"):
            three.receive(TIMEOUT)
        three.close("a fault of its own")
        with pytest.raises(EngineFailed, match="stage 3 has given up: a fault of its own"):
            first.outputs(1, torch.zeros(0, 8))


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_nobody_who_does_not_know_the_secret_is_let_in_nor_spoken_to() -> None:
    door = listener()
    with pytest.raises(EngineFailed, match="check that the secret is the same"):
        connect(door.address, secret("another, of 16 b"), "stage 0", TIMEOUT, 0.0)
    with socket.create_connection((door.address.host, door.address.port)) as stranger:
        stranger.sendall(random.randbytes(4096))
        stranger.settimeout(TIMEOUT)
        said = b""
        while part := _received(stranger):
            said += part
    assert len(said) == 32, "a nonce and nothing else"
    assert door.next(0.2) is None
    door.close()


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def test_an_address_is_free_once_its_listener_is_closed() -> None:
    address = Address("127.0.0.1")
    for _ in range(10):
        one = StageListener(address, secret(), TIMEOUT)
        address = one.address  # the next one listens there at once
        one.close()


def test_who_says_nothing_holds_up_nobody() -> None:
    door = listener()
    silent = [socket.create_connection((door.address.host, door.address.port)) for _ in range(10)]
    link = connect(door.address, secret(), "stage 0", TIMEOUT, 0.0)
    link.send(Hello(1, "a model", ""))
    arrived = door.next(TIMEOUT)
    assert arrived is not None and arrived[1] == Hello(1, "a model", "")
    for connection in silent:
        connection.close()
    link.close()
    door.close()


def test_a_stage_with_another_model_is_refused() -> None:
    door = listener()
    first = FirstStage(door, 2, 1, Launch("", TIMEOUT))
    link = connect(door.address, secret(), "stage 0", TIMEOUT, 0.0)
    link.send(Hello(1, "another", ""))
    with pytest.raises(EngineFailed, match="stage 1 runs another model than stage 0"):
        first.gather("a model", TIMEOUT)
    first.close()
    link.close()


def test_a_machine_that_cannot_start_its_ranks_says_why() -> None:
    door = listener()
    first = FirstStage(door, 2, 2, Launch("a model", 7.0))
    link = connect(door.address, secret(), "the first machine", TIMEOUT, 0.0)
    link.send(Join(1))
    gathered = threading.Thread(target=refused, args=(first,))
    gathered.start()
    said = link.receive(TIMEOUT)
    assert said is not None and said[0] == Launch("a model", 7.0)
    link.close("no such model here")
    gathered.join(TIMEOUT)
    assert not gathered.is_alive()
    first.close()


def refused(first: FirstStage) -> None:
    with pytest.raises(EngineFailed, match="machine 1 has given up: no such model here"):
        first.gather("a model", TIMEOUT)


def test_who_does_not_come_is_named() -> None:
    for num_nodes, sentence in ((1, "stage 1 of 3 has not come"), (3, "machine 1 of 3 has not come")):
        first = FirstStage(listener(), 3, num_nodes, Launch("", TIMEOUT))
        with pytest.raises(EngineFailed, match=sentence):
            first.gather("a model", 0.1)
        first.close()


def test_an_end_that_does_not_read_is_not_waited_for() -> None:
    one, other = socket.socketpair()
    link = Link(one, "stage 2", 1.0)
    with pytest.raises(EngineFailed, match="stage 2 did not read its messages in time"):
        hand_on_for_ever(LaterStage(Shard(0, 1, 0, 3), link, None, None, TIMEOUT), torch.zeros(1 << 20))
    other.close()
    link.close()


def test_shards_are_counted_stage_after_stage() -> None:
    shards = [Shard.from_rank(number, 2, 3) for number in range(6)]
    assert [(one.stage, one.rank) for one in shards] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [one.is_first_stage for one in shards] == [True, True, False, False, False, False]
    assert [one.is_last_stage for one in shards] == [False, False, False, False, True, True]
