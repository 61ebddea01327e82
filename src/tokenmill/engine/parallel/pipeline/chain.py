"""The stages of an engine: let them find each other, agree, and hand on what they have computed.

Only rank 0 of a stage speaks with other stages. Stage 0 listens; the others connect to it. Each says where the stage
before it finds it, and is told where the next one is:

    stage 0 ──hidden states──> stage 1 ──hidden states──> stage 2 ...
       ^                                                      │
       └────────────── normed outputs ── the last ────────────┘

Between stages 0 and 1 one connection serves both ways. When one stage is gone the connections of its neighbours end,
then theirs, and so all of them within a moment.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING

from tokenmill.core.errors import EngineFailed
from tokenmill.engine.parallel.messages import RunPass
from tokenmill.engine.parallel.pipeline.link import (
    Bye,
    Hello,
    Join,
    Launch,
    Link,
    Message,
    Outputs,
    Pages,
    Pass,
    Welcome,
    hidden_states,
    prove,
)
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import Secret
from tokenmill.model.sharding.shard import Shard

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray

# How long a new connection may take to say who it is.
PROOF_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_TRY_SECONDS = 1.0


class StageListener:
    """Accepts connections that prove that they know the secret; a thread for each, so that none blocks others."""

    def __init__(self, address: Address, secret: Secret | None, timeout: float) -> None:
        """Listen at the address.

        Raises:
            EngineFailed: the address cannot be listened at.
        """
        self._secret = secret
        self._timeout = timeout
        self._arrived: queue.SimpleQueue[tuple[Link, Message]] = queue.SimpleQueue()
        self._is_closed = False
        try:
            self._listener = address.listen()
        except OSError as error:
            raise EngineFailed(f"the stages of this engine cannot meet at {address}: {error.strerror}") from error
        host, port = self._listener.getsockname()[:2] if not address.is_unix else (address.host, 0)
        self.address = Address(host, port)
        self._listener.settimeout(_LOOK_SECONDS)
        self._thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self._thread.start()

    def next(self, timeout: float) -> tuple[Link, Message] | None:
        """Return the next connection and its first message; None if none has come in time."""
        with contextlib.suppress(queue.Empty):
            return self._arrived.get(timeout=timeout)
        return None

    def close(self) -> None:
        """Stop accepting connections; the address is free then."""
        self._is_closed = True
        self._thread.join()  # the kernel listens on while a thread waits in `accept`, whoever closes the socket
        self._listener.close()
        if self.address.is_unix:
            self.address.unlink()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError):  # none has come, or it is closed
                connection, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            prove(connection, self._secret, True, PROOF_SECONDS)
        except OSError:
            connection.close()
            return
        link = Link(connection, "another stage", self._timeout)
        with contextlib.suppress(EngineFailed):
            received = link.receive(PROOF_SECONDS)
            if received is not None and not self._is_closed:
                self._arrived.put((link, received[0]))
                return
        link.close()


def connect(address: Address, secret: Secret | None, name: str, timeout: float, patience: float) -> Link:
    """Connect to a stage that listens, or will within a time.

    Raises:
        EngineFailed: no stage listens, or it does not know the secret.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = address.connect(_TRY_SECONDS)
            prove(connection, secret, False, PROOF_SECONDS)
            return Link(connection, name, timeout)
        except (ConnectionResetError, PermissionError) as error:
            raise EngineFailed(
                f"{name} at {address} refuses this machine: check that the secret is the same"
            ) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineFailed(f"{name} cannot be reached at {address}: {error.strerror or error}") from error
            time.sleep(_LOOK_SECONDS)


class FirstStage:
    """Stage 0's end of the chain: passes begin here, and their outputs come back."""

    def __init__(self, listener: StageListener, num_stages: int, num_nodes: int, launch: Launch) -> None:
        """
        Args:
            launch: message that starts other machines' ranks.
        """
        self._doorman = listener
        self._num_stages = num_stages
        self._num_nodes = num_nodes
        self._launch = launch
        self._timeout = launch.timeout
        self._links: dict[int, Link] = {}
        self._hellos: dict[int, Hello] = {}
        self._nodes: dict[int, Link] = {}
        self._num_passes = 0

    def gather(self, model: str, patience: float) -> None:
        """Wait for all stages and tell each where the next one is; let other machines start theirs.

        Args:
            model: model of this stage; stages with another one are refused.

        Raises:
            EngineFailed: a stage has not come, or runs another model.
        """
        deadline = time.monotonic() + patience
        while len(self._hellos) < self._num_stages - 1:
            if time.monotonic() > deadline:
                raise EngineFailed(f"{self._missing()} has not come")
            for link in (*self._links.values(), *self._nodes.values()):
                link.receive(0)  # they say nothing yet, unless they give up
            if (arrived := self._doorman.next(_LOOK_SECONDS)) is not None and not self._take_in(*arrived, model):
                arrived[0].close()
        self._doorman.close()
        for stage, link in self._links.items():
            last = stage == self._num_stages - 1
            link.send(Welcome("" if last else self._hellos[stage + 1].address))

    def _take_in(self, link: Link, said: Message, model: str) -> bool:
        """Take in a new connection; return False if it is not from an expected stage or machine."""
        if isinstance(said, Hello) and 0 < said.stage < self._num_stages and said.stage not in self._hellos:
            if said.model != model:
                raise EngineFailed(f"stage {said.stage} runs another model than stage 0, or has been given other flags")
            link.name = f"stage {said.stage}"
            self._links[said.stage], self._hellos[said.stage] = link, said
            return True
        if isinstance(said, Join) and 0 < said.node < self._num_nodes and said.node not in self._nodes:
            link.name = f"machine {said.node}"
            self._nodes[said.node] = link
            link.send(self._launch)
            return True
        return False

    def _missing(self) -> str:
        nodes = set(range(1, self._num_nodes)) - set(self._nodes)
        if nodes:
            return f"machine {min(nodes)} of {self._num_nodes}"
        return f"stage {min(set(range(1, self._num_stages)) - set(self._hellos))} of {self._num_stages}"

    def agree(self, count: int, patience: float) -> int:
        """Return the least count of all stages, which wait for each other here.

        Raises:
            EngineFailed: a stage has not answered in time, or is gone.
        """
        counts = [count, *(_pages(link, patience) for link in self._links.values())]
        for link in self._links.values():
            link.send(Pages(min(counts)))
        return min(counts)

    def begin_pass(self, run: RunPass, hidden: AnyArray) -> int:
        """Hand a pass on; return the number under which its outputs come back.

        Args:
            hidden: [T, hidden_size], of all tokens.
        """
        self._num_passes += 1
        self._links[1].send(Pass(self._num_passes, run), hidden)
        return self._num_passes

    def outputs(self, number: int, hidden: AnyArray) -> AnyArray:
        """Return the outputs of a pass, [S, hidden_size], normed. Unclaimed outputs of earlier passes are dropped.

        Args:
            hidden: the hidden states that the pass was handed on with.

        Raises:
            EngineFailed: they have not come in time, or a stage is gone.
        """
        last = self._links[self._num_stages - 1]
        while (received := last.receive(self._timeout)) is not None:
            message, numbers = received
            assert isinstance(message, Outputs), "the last stage says nothing else"
            if message.number == number:
                return hidden_states(numbers, hidden, hidden.shape[1])
        raise EngineFailed(f"the other stages have not come in time; {self._timeout:g} seconds are allowed in a step")

    def send_end(self) -> None:
        """Tell the next stage that the engine ends well."""
        if 1 in self._links:
            with contextlib.suppress(EngineFailed):
                self._links[1].send(Bye())

    def close(self, trouble: str = "") -> None:
        """Close all connections; the other stages end."""
        self._doorman.close()
        for link in (*self._links.values(), *self._nodes.values()):
            link.close()


class LaterStage:
    """A later stage's end of the chain: receives from the stage before it, and hands on its own work."""

    def __init__(
        self, shard: Shard, first: Link, listener: StageListener | None, secret: Secret | None, timeout: float
    ) -> None:
        """
        Args:
            first: the connection to stage 0.
            listener: where the stage before this one connects; None: that is stage 0.
        """
        self._shard = shard
        self._first = first
        self._before = first
        self._next = first
        self._doorman = listener
        self._secret = secret
        self._timeout = timeout

    def join(self, model: str, patience: float) -> None:
        """Register with stage 0, and connect to the neighbours.

        Args:
            model: model of this stage.

        Raises:
            EngineFailed: stage 0 refuses it, or a neighbour has not come.
        """
        own = "" if self._doorman is None else str(self._doorman.address)
        self._first.send(Hello(self._shard.stage, model, own))
        received = self._first.receive(patience)
        if received is None or not isinstance(welcome := received[0], Welcome):
            raise EngineFailed("stage 0 has not begun")
        if welcome.next:
            name = f"stage {self._shard.stage + 1}"
            self._next = connect(Address.parse(welcome.next), self._secret, name, self._timeout, PROOF_SECONDS)
            self._next.send(Hello(self._shard.stage, model, ""))
        if self._doorman is not None:
            deadline = time.monotonic() + patience
            while (arrived := self._doorman.next(_LOOK_SECONDS)) is None:
                if time.monotonic() > deadline:
                    raise EngineFailed(f"stage {self._shard.stage - 1} has not come")
            self._doorman.close()
            self._before, _ = arrived
            self._before.name = f"stage {self._shard.stage - 1}"

    def agree(self, count: int, patience: float) -> int:
        """Send this stage's count to stage 0 and return the least of all stages."""
        self._first.send(Pages(count))
        return _pages(self._first, patience)

    def receive(self, timeout: float) -> tuple[Pass, bytearray] | Bye | None:
        """Return the pass that the stage before this one has handed on; None if none has come in time.

        Raises:
            EngineFailed: it is gone.
        """
        if (received := self._before.receive(timeout)) is None:
            return None
        message, numbers = received
        if isinstance(message, Bye):
            return message
        assert isinstance(message, Pass), "nothing else is handed on"
        return message, numbers

    def hand_on(self, begun: Pass, hidden: AnyArray) -> None:
        """Hand a pass on, or, behind the last layers, its outputs back to stage 0."""
        if self._shard.is_last_stage:
            self._first.send(Outputs(begun.number), hidden)
        else:
            self._next.send(begun, hidden)

    def send_end(self) -> None:
        """Tell the next stage that the engine ends well."""
        if not self._shard.is_last_stage:
            with contextlib.suppress(EngineFailed):
                self._next.send(Bye())

    def close(self, trouble: str = "") -> None:
        """Close all connections; tell stage 0 the trouble, if there is any."""
        if self._doorman is not None:
            self._doorman.close()
        self._first.close(trouble)
        for link in {self._before, self._next} - {self._first}:
            link.close()


def _pages(link: Link, patience: float) -> int:
    received = link.receive(patience)
    if received is None or not isinstance(received[0], Pages):
        raise EngineFailed(f"{link.name} has not come in time")
    return received[0].count
