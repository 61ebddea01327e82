"""The adapters of an engine that is being built: whether it may have any, where they are kept, and the first ones."""

from __future__ import annotations

from tokenmill.config.configs import EngineConfig
from tokenmill.config.fields import adapter_modules
from tokenmill.core.adapters import AdapterRef
from tokenmill.model.adapters.cache import AdapterCache
from tokenmill.model.adapters.packing import AdapterForm, AdapterReader, FollowedAdapters
from tokenmill.model.adapters.places import check_adaptable
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.platform.protocol import Platform


def adapter_cache(
    config: EngineConfig, platform: Platform, decoder: Decoder, kernels: Kernels, in_one_call: bool
) -> AdapterCache | None:
    """Return the cache of adapters; None without `--enable-lora`. `in_one_call`: each pass is one native call."""
    if not config.enable_lora:
        return None
    check_adaptable(decoder.architecture)
    slots, form = None, _form(in_one_call)
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


def first_adapters(config: EngineConfig, cache: AdapterCache | None) -> list[AdapterRef]:
    """Read each adapter of `--lora-modules` once.

    Raises:
        InvalidConfig: a name is given twice.
        InvalidCheckpoint: an adapter cannot be served; says why.
    """
    if cache is None:
        return []
    return [cache.look_at(name, path) for name, path in adapter_modules(config.lora_modules).items()]
