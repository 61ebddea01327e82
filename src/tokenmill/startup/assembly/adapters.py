"""LoRA adapters: where an engine keeps them, the first ones, and those of a rank that follows."""

from __future__ import annotations

from typing import Self

from tokenmill.config.configs import EngineConfig
from tokenmill.config.fields import adapter_modules
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.engine_messages import EngineReady
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.model.adapters.cache import AdapterCache
from tokenmill.model.adapters.packing import AdapterForm, AdapterReader, FollowedAdapters
from tokenmill.model.adapters.places import check_adaptable
from tokenmill.model.adapters.requests import AdapterRequests
from tokenmill.model.adapters.rows import HostRowAdapters
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.native_decoder import native_pass_obstacle
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.loading import LoadedModel
from tokenmill.startup.assembly.memory import StepMemory


class Adapters(Capability):
    """Requests wait at the cache until their adapter is there; rows have slots, which steps read."""

    def __init__(self, assembly: Assembly, cache: AdapterCache, named: list[AdapterRef]) -> None:
        self._config = assembly.config
        self._device = assembly.platform.device
        self._cache = cache
        self._named = named

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Make the cache, with `--enable-lora`, and read each adapter of `--lora-modules` once.

        Raises:
            InvalidConfig: the model can have no adapters, or a name is given twice.
            InvalidCheckpoint: an adapter cannot be served; says why.
        """
        config, model = assembly.config, assembly.model
        if not config.enable_lora:
            return None
        cache = _make_cache(config, assembly.platform, model)
        modules = adapter_modules(config.lora_modules)
        return cls(assembly, cache, [cache.look_at(name, path) for name, path in modules.items()])

    def gates(self) -> tuple[AdapterCache]:
        """Return the cache."""
        return (self._cache,)

    def row_extensions(self, memory: StepMemory) -> tuple[RowExtension]:
        """Return the slots of rows."""
        num_rows, find, slots = self._config.max_num_seqs, self._cache.find, self._cache.slots
        if slots is None:
            return (HostRowAdapters(num_rows, find),)
        from tokenmill.model.adapters.device_rows import DeviceRowAdapters

        return (DeviceRowAdapters(num_rows, find, slots, self._device),)

    def engine_extensions(self, scheduler: EngineScheduler) -> tuple[AdapterRequests]:
        """Return the part that answers requests to load an adapter."""
        return (AdapterRequests(self._cache),)

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell which adapters there are, and how many may be in use."""
        ready.adapters, ready.max_loras = self._named, self._config.max_loras


def _make_cache(config: EngineConfig, platform: Platform, model: LoadedModel) -> AdapterCache:
    decoder, kernels = model.decoder, model.kernels
    check_adaptable(decoder.architecture)
    slots, form = None, _form(native_pass_obstacle(decoder, model.attention.name) is None)
    if platform.is_accelerator:
        from tokenmill.model.adapters.slot_memory import SlotMemory

        slots, form = SlotMemory(decoder, kernels, config.max_loras, config.max_lora_rank), AdapterForm.SLOTS
    return AdapterCache(AdapterReader(decoder, kernels, config.max_lora_rank, form), _most(config), slots)


def followed_adapters(
    config: EngineConfig, decoder: Decoder, kernels: Kernels, in_one_call: bool
) -> FollowedAdapters | None:
    """Return the adapters of a rank that follows rank 0; None without `--enable-lora`."""
    if not config.enable_lora:
        return None
    return FollowedAdapters(AdapterReader(decoder, kernels, config.max_lora_rank, _form(in_one_call)), _most(config))


def _form(in_one_call: bool) -> AdapterForm:
    return AdapterForm.ONE_CALL if in_one_call else AdapterForm.KERNELS


def _most(config: EngineConfig) -> int:
    return config.max_cpu_loras or 4 * config.max_loras
