"""Find a model, choose kernels for it and read it: the first half of the start of an engine and of each rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.engine.loop.step_log import check_writable
from tokenmill.model.adapters.merging import merged
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.context import ContextRanks
from tokenmill.model.attention.context_step import ContextDevices
from tokenmill.model.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.model.attention.registry import AttentionChoice
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.quantization.packed import UNQUANTIZED
from tokenmill.model.sharding.collective import ALONE
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.fingerprint import fingerprint
from tokenmill.model.weights.hub import fetch
from tokenmill.model.weights.importance import InputImportance
from tokenmill.model.weights.loader import ModelPlan, plan_model
from tokenmill.model.weights.mixture import summary
from tokenmill.model.weights.sharing import LoadedWeights, load_weights
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.drafting import find_draft, speculation_of
from tokenmill.startup.assembly.mixing import with_measured_bits
from tokenmill.startup.machine.device import (
    ONE_THREAD_BYTES,
    check,
    choose_backend,
    choose_kernels,
    choose_threads,
    within_budget,
)
from tokenmill.startup.machine.torch_needs import check_torch
from tokenmill.startup.sizing.fit import check_fit, check_parameters
from tokenmill.startup.sizing.kv_size import KVSize, beside_copies, decide_kv_size, scratch_size, wanted_context
from tokenmill.startup.sizing.state_size import BYTES_OF, check_recurrence_sizes
from tokenmill.startup.sizing.window_size import PageBytes, decide_grouped_size, least_page_bytes, window_group_obstacle

if TYPE_CHECKING:
    from tokenmill.startup.assembly.draft_loading import LoadedDraft
    from tokenmill.startup.ranks.group import Group

Progress = Callable[[str, int, int], None]
# Longer than any sequence that measures inputs.
IMPORTANCE_CONTEXT = 1024
Check = Callable[[EngineConfig, Architecture, Platform], None]


class StartupTimer:
    """Times each start-up phase in seconds, and reports the progress of the current one.

    Attributes:
        current: the phase that began last.
    """

    def __init__(self, report: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self.current = "starting"
        self._report = report

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Time a phase; yields the function that reports `done, total` within it."""
        start = time.perf_counter()
        self.current = name
        self._report(name, 0, 0)
        yield lambda done, total: self.report(name, done, total)
        self.seconds[name] = time.perf_counter() - start

    def report(self, name: str, done: int, total: int) -> None:
        """Report the progress of a part of the current phase under a name of its own."""
        self._report(name, done, total)


class LoadedModel(msgspec.Struct, frozen=True):
    """A model with its weights in memory, and the choices made for it, each with its reason.

    Attributes:
        group: the ranks that run it together; None: it is whole.
        merged: digest of the adapter that is folded into the weights; "": no adapter.
        window_obstacle: why layers with a window have no page group of their own; see `window_group_obstacle`.
    """

    folder: Path
    architecture: Architecture
    weights: LoadedWeights
    kernels: Kernels
    kernels_reason: str
    attention: AttentionChoice
    weight_bytes: int
    num_threads: int
    threads_reason: str
    draft: LoadedDraft | None = None
    group: Group | None = None
    merged: str = ""
    window_obstacle: str | None = ""

    @property
    def page_bytes(self) -> PageBytes:
        """Bytes of a page of its KV cache, by group."""
        attention = self.attention
        return PageBytes(attention.bytes_per_page, attention.bytes_per_window_page, self.architecture.widest_window)

    @property
    def decoder(self) -> Decoder:
        """The decoder that its weights belong to."""
        return self.weights.decoder


def load(
    config: EngineConfig, platform: Platform, timer: StartupTimer, checks: Sequence[Check], group: Group | None = None
) -> LoadedModel:
    """Find a model, choose kernels and threads for it, and load its weights in the kernels' formats.

    Everything that can be refused is refused before weights are read.

    Args:
        checks: of the engine's capabilities; see `Capability.check`.
        group: the ranks that share it; all have their weights when this returns. None: it is read whole.
    """
    if config.step_log:
        check_writable(Path(config.step_log))
    folder, architecture, obstacle = _find(config, platform, timer, checks)
    check(config, platform)
    check_parameters(config, platform, architecture)
    collective = ALONE if group is None else group.connect(architecture, _content(config, folder), platform)
    num_threads, threads_reason = choose_threads(config, platform, _thread_bytes(config, architecture))
    kernels, kernels_reason = _choose_kernels(config, platform, folder, architecture, num_threads)
    check_recurrence_sizes(architecture, kernels.name)
    plan = plan_model(folder, architecture, kernels, config.load_format, collective)
    plan = _adjusted(plan, folder, config, platform, timer)
    attention = choose_backend(config, platform, plan.shapes.attention_spec, kernels, *_shares_of(config, group))
    draft = find_draft(config, platform, folder, num_threads, timer.phase)
    draft_bytes = 0 if draft is None else draft.page_bytes
    page_bytes = _least_bytes(config, architecture, attention, draft_bytes, obstacle is None)
    check_fit(config, platform, folder, plan, page_bytes, num_threads)
    if group is not None:
        group.wait_for_all()
    with timer.phase("loading weights") as progress:
        plan = _mixed(plan, folder, config, timer)
        weights = load_weights(plan, folder, config, progress)
        if group is not None:
            group.wait_for_all()
    return LoadedModel(
        folder,
        architecture,
        _with_choice(weights, plan),
        plan.kernels,
        kernels_reason,
        attention,
        plan.weight_bytes,
        num_threads,
        threads_reason,
        draft,
        group,
        plan.merged,
        obstacle,
    )


def _shares_of(config: EngineConfig, group: Group | None) -> tuple[ContextRanks | None, ContextDevices | None]:
    """Return by which ranks share a context: one memory of the host, or devices with a part of the pages each."""
    if group is None or group.devices is None or config.context_parallel_size == 1:
        return None if group is None else group.context, None
    return None, ContextDevices(group.shard.rank, group.shard.size, group.devices.communicator.gather)


def _choose_kernels(
    config: EngineConfig, platform: Platform, folder: Path, architecture: Architecture, num_threads: int
) -> tuple[Kernels, str]:
    """Return kernels in formats that fit the budget, and why these."""
    kernels, reason = choose_kernels(config, platform, folder, num_threads, architecture)
    platform.set_num_threads(num_threads)  # the kernels may have brought torch
    return within_budget(config, kernels, architecture), reason


def _find(
    config: EngineConfig, platform: Platform, timer: StartupTimer, checks: Sequence[Check]
) -> tuple[Path, Architecture, str | None]:
    """Return a model's folder, its architecture for the wanted context, and what `window_group_obstacle` says of it."""
    with timer.phase("finding the model") as progress:
        folder = fetch(config.model, config.revision, config.download_dir, progress)
        architecture = read_architecture(folder)
    if config.language_model_only:
        architecture = architecture.without_media()
    check_torch(config, architecture, platform)
    for check_capability in checks:
        check_capability(config, architecture, platform)
    architecture = architecture.for_context(wanted_context(config, architecture.max_position))
    speculative = speculation_of(config, platform)
    has_draft_model = speculative is not None and speculative.loads_weights
    obstacle = window_group_obstacle(config, architecture, has_draft_model)
    if obstacle is None:
        architecture = architecture.with_window_group()
    return folder, architecture, obstacle


def _adjusted(
    plan: ModelPlan, folder: Path, config: EngineConfig, platform: Platform, timer: StartupTimer
) -> ModelPlan:
    """Return the plan with what comes between reading and packing: weighed errors of integers, a merged adapter."""
    plan = _weighed(plan, folder, config, platform, timer)
    return plan if config.lora_merge is None else merged(plan, Path(config.lora_merge), config.max_lora_rank)


def _weighed(plan: ModelPlan, folder: Path, config: EngineConfig, platform: Platform, timer: StartupTimer) -> ModelPlan:
    """Return a plan of int8 or int4 with a measuring of inputs, where the model and its files allow that."""
    if config.quantization not in ("int8", "int4"):
        return plan
    kernels, tokenizer = plan.kernels, Path(config.tokenizer or folder) / "tokenizer.json"
    architecture = read_architecture(folder).for_context(IMPORTANCE_CONTEXT)
    is_possible = plan.reads is not None and isinstance(kernels, NativeKernels) and tokenizer.exists()
    is_possible &= architecture.needs_kv and architecture.per_layer is None and not architecture.clip_length
    if not is_possible or architecture.recurrences:
        return plan
    assert isinstance(kernels, NativeKernels), "checked above"
    automatic = dataclasses.replace(config, attention_backend="auto", kv_cache_dtype="auto")

    def make_attention(spec: AttentionSpec, num_pages: int) -> AttentionBackend:
        return choose_backend(automatic, platform, spec, kernels).make(num_pages)

    def report(done: int, total: int) -> None:
        timer.report(f"measuring inputs for {config.quantization}", done, total)

    shape = folder, tokenizer, architecture, kernels, config.load_format, config.page_size
    return msgspec.structs.replace(
        plan, importance=InputImportance(*shape, make_attention, report, config.quantization == "int4")
    )


def _mixed(plan: ModelPlan, folder: Path, config: EngineConfig, timer: StartupTimer) -> ModelPlan:
    """Return the plan with the bits that int4's matrices need, as measured."""

    def report(done: int, total: int) -> None:
        timer.report("choosing bits for int4", done, total)

    mixed = with_measured_bits(plan, folder, config, report) if config.quantization == "int4" else plan
    if mixed is plan:
        return plan
    mixed = msgspec.structs.replace(mixed, importance=plan.importance)
    return mixed if config.lora_merge is None else merged(mixed, Path(config.lora_merge), config.max_lora_rank)


def _with_choice(weights: LoadedWeights, plan: ModelPlan) -> LoadedWeights:
    """Return the weights with the chosen bits in their origin's words."""
    formats = getattr(plan.kernels, "formats", UNQUANTIZED)
    return msgspec.structs.replace(weights, source="; ".join(filter(None, (weights.source, summary(formats)))))


def _least_bytes(
    config: EngineConfig, architecture: Architecture, attention: AttentionChoice, draft_bytes: int, has_windows: bool
) -> int:
    """Return the bytes that a page takes at least, over all groups; `draft_bytes`: of a draft model's page."""
    page_bytes = -(-attention.bytes_per_page // config.context_parallel_size) + draft_bytes
    if not has_windows:
        return page_bytes
    pages = PageBytes(page_bytes, attention.bytes_per_window_page, architecture.widest_window)
    return least_page_bytes(config, architecture.max_position, pages)


def _thread_bytes(config: EngineConfig, architecture: Architecture) -> int:
    """Return the bytes of weights by which threads are chosen."""
    num_bytes = architecture.num_parameters() * BYTES_OF[config.dtype]
    # A step of an encoder is a whole budget of tokens: its products are long, however small the model is.
    return num_bytes if architecture.needs_kv else max(num_bytes, ONE_THREAD_BYTES)


def _content(config: EngineConfig, folder: Path) -> str:
    """Return a fingerprint that all ranks must share: of the model's files and of the formats it runs in."""
    adapter = Path(config.lora_merge or "/")
    merged = fingerprint(adapter) if config.lora_merge and adapter.is_dir() else ""
    return fingerprint(folder, config.dtype, config.weight_form, merged)


def size_kv(
    config: EngineConfig, platform: Platform, model: LoadedModel, available: int | None = None, reserved: int = 0
) -> KVSize:
    """Decide the size of the KV cache, with the pages of a draft model in it; the same for all ranks.

    Args:
        available: free bytes; None: as many as the platform reports.
        reserved: bytes of these that are kept for other uses.

    Raises:
        InvalidConfig: one full request does not fit; see `decide_kv_size`.
    """
    if not model.architecture.needs_kv:
        return scratch_size(config, model.architecture.max_position)
    # Ranks that share a context have a part of each page.
    page_bytes = -(-model.attention.bytes_per_page // config.context_parallel_size)
    if available is None:
        states = config.state_memory or 0 if model.architecture.recurrences else 0
        available = max(0, platform.available_bytes() - model.weights.file_bytes - states)
    available = max(0, available - reserved)
    if model.draft is not None:
        page_bytes, available = page_bytes + model.draft.page_bytes, max(0, available - model.draft.scratch_bytes)
    besides = 0
    if (devices := model.attention.config.devices) is not None:
        besides = model.attention.bytes_per_page - page_bytes
        config, available = beside_copies(config, available, besides, model.attention.num_layers, devices.size)

    def decide(config: EngineConfig) -> KVSize:
        return decide_kv_size(config, model.architecture.max_position, page_bytes, available, besides)

    if model.window_obstacle is None:
        return decide_grouped_size(config, model.architecture.max_position, model.page_bytes, available)
    return decide(config) if model.group is None else model.group.agree(config, model.architecture, decide)
