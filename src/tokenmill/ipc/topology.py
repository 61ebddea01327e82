"""The engines, ranks and text workers of a server: the supervisor starts them, and every process reads this data."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenmill.ipc.channels import engine_name, worker_name


class EngineSpec(msgspec.Struct, frozen=True):
    """One engine: `num_ranks` processes that share a model. Rank 0 schedules and takes requests.

    Attributes:
        model: its model; empty: that of the config.
        share: the part of the machine that it takes and the number of equal parts; None: one part for each engine.
    """

    index: int
    num_ranks: int = 1
    model: str = ""
    share: tuple[int, int] | None = None

    @property
    def parts(self) -> list[str]:
        """Names of its ranks' inboxes."""
        return [engine_name(self.index, rank) for rank in range(self.num_ranks)]


class Topology(msgspec.Struct, frozen=True):
    """The parts of a server.

    Attributes:
        engines: all with the same model, except while another takes its place.
        tokenizer_workers: text workers of each API process; 0: one that is a thread of it.
        api_servers: API processes. The first starts the other parts but its API workers, which the parent starts.
    """

    engines: tuple[EngineSpec, ...] = (EngineSpec(0),)
    tokenizer_workers: int = 1
    api_servers: int = 1

    def with_engines(self, engines: Iterable[EngineSpec]) -> Topology:
        """Return the same topology with other engines."""
        return msgspec.structs.replace(self, engines=tuple(engines))

    @property
    def workers(self) -> range:
        """Indices of all text workers."""
        return range(self.api_servers * max(1, self.tokenizer_workers))

    def workers_of(self, api: int) -> range:
        """Return the indices of the text workers of one API process."""
        each = max(1, self.tokenizer_workers)
        return range(api * each, (api + 1) * each)

    def api_of(self, worker: int) -> int:
        """Return the index of the API process that a text worker belongs to."""
        return worker // max(1, self.tokenizer_workers)

    @property
    def api_workers(self) -> range:
        """Indices of the API processes beside the first."""
        return range(1, self.api_servers)

    @property
    def has_replicas(self) -> bool:
        """True if there is more than one engine."""
        return len(self.engines) > 1

    @property
    def num_processes(self) -> int:
        """Number of processes beside the first API process."""
        num_ranks = sum(engine.num_ranks for engine in self.engines)
        return num_ranks + self.api_servers * (self.tokenizer_workers + 1) - 1

    @property
    def parts(self) -> dict[str, str]:
        """Names of the parts in sentences, by the names of their inboxes. A single engine has no number."""
        called: dict[str, str] = {}
        for engine in self.engines:
            name = f"engine {engine.index}" if self.has_replicas else "engine"
            called |= {part: f"{name} rank {rank}" if rank else name for rank, part in enumerate(engine.parts)}
        return called | {worker_name(worker): f"text worker {worker}" for worker in self.workers}

    def label(self, part: str) -> str:
        """Return the name of a part in metrics and in the fields of a log line: one word."""
        return self.parts[part].removeprefix("text ").replace(" ", "-")


def request_mark(worker: int) -> str:
    """Return the prefix of the ids of all requests that go through this text worker."""
    return f"{worker}-"
