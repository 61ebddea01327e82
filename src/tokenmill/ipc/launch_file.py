"""`LaunchFile`: the configs and the topology of a server, which every child process reads first."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.fields import KVEventsConfig
from tokenmill.core.errors import DiskFull
from tokenmill.core.whole_file import write_whole
from tokenmill.ipc.channels import engine_name
from tokenmill.ipc.topology import Topology


class LaunchFile(msgspec.Struct):
    """The contents of `launch.json` in the private folder."""

    engine: EngineConfig
    server: ServerConfig
    topology: Topology = Topology()

    def write(self, folder: Path) -> None:
        """Write the file for the children, without the API keys, which they do not need.

        Raises:
            DiskFull: it cannot be written; the one before is still there.
        """
        shown = msgspec.structs.replace(self, server=dataclasses.replace(self.server, api_key=()))
        try:
            write_whole(folder / "launch.json", msgspec.json.encode(shown))
        except OSError as error:
            raise DiskFull(f"the server cannot write its own files, set TMPDIR: {error.strerror}") from error

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Return True if it has been written."""
        return (folder / "launch.json").exists()

    @classmethod
    def read(cls, folder: Path) -> LaunchFile:
        """Read what the parent wrote."""
        return msgspec.json.decode((folder / "launch.json").read_bytes(), type=cls)

    def engine_config(self, index: int, life: int = 0, rank: int = 0, folder: Path = Path()) -> EngineConfig:
        """Return the config of one engine, or of a rank of it: no two engines write the same file, publish at the same
        address or draw the same seeds.

        `life`: how often it has been started again; the files of its earlier lives are kept. `folder`: the private one.
        """
        (spec,) = (spec for spec in self.topology.engines if spec.index == index)
        config = dataclasses.replace(self.engine, model=spec.model or self.engine.model)
        if config.num_ranks > 1:
            meeting = str(folder / f"{engine_name(index, life=life)}.ranks")
            config = dataclasses.replace(config, rank=rank, rendezvous=meeting, rank_timeout=self.server.engine_timeout)
            config = dataclasses.replace(config, master_port=config.master_port + index)
        if config.step_log and life:
            config = dataclasses.replace(config, step_log=f"{config.step_log}.life-{life}")
        if self.topology.has_replicas:
            # A GPU for each, and for each of its ranks.
            number = index * config.tensor_parallel_size
            device = f"{config.device}:{number}" if config.device in ("auto", "cuda") else config.device
            share = spec.share or (index, len(self.topology.engines))
            config = dataclasses.replace(config, device=device, replica=share)
        if index == 0:
            return config
        events, step_log = config.kv_events(), config.step_log
        moved = None if events is None else msgspec.json.encode(_moved(events, index)).decode()
        return dataclasses.replace(
            config,
            seed=config.seed + index,
            step_log=step_log and f"{step_log}.{index}",
            kv_events_config=moved,
        )


def _moved(events: KVEventsConfig, index: int) -> KVEventsConfig:
    replay = events.replay_endpoint and _address(events.replay_endpoint, index)
    return msgspec.structs.replace(events, endpoint=_address(events.endpoint, index), replay_endpoint=replay)


def _address(endpoint: str, index: int) -> str:
    """Return an endpoint with `index` added to its port, as vLLM does; without a port, to its name (never of tcp:)."""
    host, _, port = endpoint.rpartition(":")
    if port.isdigit():
        return f"{host}:{int(port) + index}"
    return endpoint if endpoint.startswith("tcp:") else f"{endpoint}_dp{index}"
