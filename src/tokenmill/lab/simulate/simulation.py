"""Set up simulations from flags: the engines, and the requests they get."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.engine.kv.page_pool import RESERVED_PAGES
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.scheduler.config import policies_of
from tokenmill.lab.simulate.fleet import CountingExecutor, Fleet, SimulatedEngine, SimulatedLog
from tokenmill.lab.simulate.lifetimes import Outcome
from tokenmill.lab.simulate.replay import RecordedExecutor
from tokenmill.lab.simulate.step_model import StepModel
from tokenmill.lab.simulate.times import ModelTimes, recorded_run
from tokenmill.lab.simulate.traces import Arrival, as_inputs
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.architecture_config import read_architecture
from tokenmill.serving.replicas.routing.policies import policy_of
from tokenmill.startup.assembly.scheduler_class import check_scheduler_flags
from tokenmill.startup.sizing.state_size import BYTES_OF, num_states, with_states

# Fields of `EngineConfig` whose rooms are not simulated, with their flags: none of them may be set.
NOT_SIMULATED = {
    "speculative_config": "--speculative-config",
    "kv_disk": "--kv-disk",
    "slot_save_path": "--slot-save-path",
    "kv_host_size": "--kv-host-size",
    "kv_source": "--kv-source",
    "kv_transfer_config": "--kv-transfer-config",
}


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """A group of identical engines, and the times of their steps.

    Attributes:
        header: the settings that the scheduler of each starts with.
        routing_policy: decides which engine gets a request; see `--routing-policy`.
        seed: of the random part of step times; None: exactly the times of the model.
        is_bound: refuse steps beyond the sizes that the model was fitted to.
        step_log: the log of the first engine's steps, with those of the others beside it; None: no log.
    """

    header: LogHeader
    model: StepModel
    num_engines: int = 1
    routing_policy: str = "cost"
    seed: int | None = 0
    is_bound: bool = True
    step_log: Path | None = None

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Run the requests of a trace.

        Raises:
            InvalidConfig: a step is beyond the sizes that the model was fitted to, or there is no such policy.
        """
        scheduler = self.header.scheduler
        policies_of(scheduler)
        engines = [
            SimulatedEngine(
                self.header,
                CountingExecutor(self.header.vocab_size),
                ModelTimes(self.model, None if self.seed is None else self.seed + index, self.is_bound),
                self._log(index),
            )
            for index in range(self.num_engines)
        ]
        page_size = self.header.page_size if self.header.enable_prefix_caching else 0
        outcome = Fleet(engines, policy_of(self.routing_policy), page_size).run(as_inputs(arrivals))
        for engine in engines:
            engine.close()
        outcome.name = "/".join((scheduler.policy, scheduler.batch_policy, scheduler.admission))
        return outcome

    def _log(self, index: int) -> SimulatedLog | None:
        path = self.step_log
        if path is None:
            return None
        return SimulatedLog(path.with_name(f"{path.name}.{index}") if index else path, self.header)

    def with_policies(self, fields: Mapping[str, str]) -> Simulation:
        """Return a copy with other fields of `SchedulerConfig`."""
        scheduler = msgspec.structs.replace(self.header.scheduler, **fields)
        return msgspec.structs.replace(self, header=msgspec.structs.replace(self.header, scheduler=scheduler))

    def with_engines(self, num_engines: int) -> Simulation:
        """Return a copy with another number of engines."""
        return msgspec.structs.replace(self, num_engines=num_engines)


def run_recorded(path: Path) -> Outcome:
    """Run a log again: its own arrivals, outcomes and times, through the real engine loop.

    Raises:
        TokenMillError: the file is no step log, or it was cut off.
    """
    header, records, inputs, times = recorded_run(path)
    engine = SimulatedEngine(header, RecordedExecutor(records), times)
    outcome = Fleet([engine], policy_of("fewest"), 0).run(inputs)
    outcome.name = "as recorded"
    return outcome


def header_of(config: EngineConfig) -> LogHeader:
    """Return the step-log header with which an engine of this config would start, without reading its weights.

    Args:
        config: `model` is a folder or a config.json; a device `auto` is a CPU.

    Raises:
        InvalidCheckpoint: there is no such model, or it is of a kind that is not supported.
        InvalidConfig: a flag cannot be simulated, or the size of the KV cache is missing.
    """
    for name, flag in NOT_SIMULATED.items():
        if getattr(config, name):
            raise InvalidConfig(f"{flag} cannot be simulated: only steps, scheduling, the prefix cache and routing are")
    if config.device == "auto":
        config = dataclasses.replace(config, device="cpu")
    config = config.resolve()
    check_scheduler_flags(config)
    architecture = _architecture(config.model)
    most = architecture.max_position
    if config.max_model_len is not None and config.max_model_len > most:
        raise InvalidConfig(f"--max-model-len {config.max_model_len} exceeds the model's context of {most} tokens")
    num_pages = _num_pages(config, architecture)
    max_model_len = min(config.max_model_len or most, num_pages * config.page_size)
    if config.max_model_len is not None and max_model_len < config.max_model_len:
        raise InvalidConfig(
            f"the KV cache holds {max_model_len} tokens, --max-model-len {config.max_model_len} does not fit"
        )
    if architecture.recurrences and config.state_memory is None:
        raise InvalidConfig("a simulation has no memory of its own: say --state-memory, for recurrent states")
    config = with_states(config, architecture, 0)
    slots = num_states(config, architecture)
    return LogHeader.from_config(config, num_pages, max_model_len, architecture.vocab_size, [], slots)


def each_policy(names: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Yield every combination of the named policies, as fields of `SchedulerConfig`; an empty one if none is named."""
    chosen: list[dict[str, str]] = [{}]
    for field, values in names.items():
        if values:
            chosen = [{**before, field: value} for before in chosen for value in values]
    yield from chosen


def _architecture(model: str) -> Architecture:
    path = Path(model).expanduser()
    folder, name = (path.parent, path.name) if path.suffix == ".json" else (path, "config.json")
    found = read_json(folder, name)
    if not found:
        raise InvalidCheckpoint(f"a simulation needs a model's folder or its config.json; {model!r} is neither")
    return read_architecture(found, str(folder / name))


def _num_pages(config: EngineConfig, architecture: Architecture) -> int:
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_cache_memory_bytes is None:
        raise InvalidConfig("a simulation has no memory of its own: say --num-pages or --kv-cache-memory-bytes")
    if config.kv_cache_dtype != "auto" or config.dtype not in BYTES_OF:
        raise InvalidConfig("a simulation does not know the size of such pages: say --num-pages")
    per_page = architecture.kv_bytes_per_token(BYTES_OF[config.dtype]) * config.page_size
    num_pages = config.kv_cache_memory_bytes // per_page - RESERVED_PAGES
    if num_pages < 1:
        raise InvalidConfig(f"--kv-cache-memory-bytes must hold a page, which takes {per_page:,} bytes, and one more")
    return num_pages
