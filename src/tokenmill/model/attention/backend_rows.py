"""The attention backends, one row each, from which `auto` takes the first that serves, imported where it is taken."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tokenmill.model.attention.backend import AttentionConfig, Backend, always, never
from tokenmill.model.attention.protocol import AttentionBackend, KVCache

if TYPE_CHECKING:
    from tokenmill.model.attention.backend import Parts


# The major capability with a kernel for prompts of its own, here and in torch's flash attention; Mini-SGLang's choice
# by device.
HOPPER = 9


def _packed() -> type[KVCache]:
    from tokenmill.model.attention.packed_kv import PackedKV

    return PackedKV


def _head_major() -> type[KVCache]:
    from tokenmill.model.attention.tensor_kv import HeadMajorKV

    return HeadMajorKV


def _token_major() -> type[KVCache]:
    from tokenmill.model.attention.tensor_kv import TokenMajorKV

    return TokenMajorKV


def _native(config: AttentionConfig, kv: Any) -> AttentionBackend:
    from tokenmill.model.attention.backends.native import NativeAttention

    return NativeAttention(config.spec, kv, config.native, config.ranks)


def _cpu(config: AttentionConfig, kv: Any) -> AttentionBackend:
    from tokenmill.model.attention.backends.cpu import CpuAttention

    return CpuAttention(config.spec, kv, config.ranks)


def _reference(config: AttentionConfig, kv: Any) -> AttentionBackend:
    from tokenmill.model.attention.backends.reference import ReferenceAttention

    return ReferenceAttention(config.spec, kv)


def _native_obstacle(config: AttentionConfig) -> str | None:
    return "it stores no clips of sound, which this model attends to" if config.spec.has_clips else None


def _alibi_obstacle(config: AttentionConfig) -> str | None:
    return "its scores do not fall with distance (ALiBi), as this model's do" if config.spec.has_alibi else None


def _sight_obstacle(config: AttentionConfig) -> str | None:
    """Return why a backend cannot serve that reads all keys of a tile, up to the token itself; None: it can."""
    if config.spec.is_windowed:
        return "it reads pages behind windows, which are given up (--disable-hybrid-kv-cache-manager keeps them)"
    return _ahead_obstacle(config)


def _ahead_obstacle(config: AttentionConfig) -> str | None:
    sees_ahead = config.spec.sees_ahead or config.spec.spans_see_ahead
    return "it sees no tokens ahead, which this model's attention does" if sees_ahead else None


def _flash_obstacle(config: AttentionConfig) -> str | None:
    from tokenmill.model.attention.backends.flash import flash_obstacle

    sinks = "it has no sinks, which this model's attention has" if config.spec.has_sinks else None
    unsuited = sinks or _sight_obstacle(config)
    return unsuited or flash_obstacle(config.spec, config.page_size, config.dtype, config.platform.device)


def _flashinfer_obstacle(config: AttentionConfig) -> str | None:
    from tokenmill.model.attention.backends.flashinfer import SINK_WRAPPER
    from tokenmill.model.attention.backends.trial import obstacle_of

    if unsuited := _ahead_obstacle(config):
        return unsuited
    if config.spec.has_sinks and not hasattr(importlib.import_module("flashinfer"), SINK_WRAPPER):
        return f"this FlashInfer has no {SINK_WRAPPER}, and this model's attention has sinks"
    prompts, _, captured = _flashinfer(config)
    made = (config.spec, config.page_size, config.dtype, config.platform.device)
    return obstacle_of("FlashInfer", (prompts, captured), *made)


def _hopper_obstacle(config: AttentionConfig) -> str | None:
    if unsuited := _sight_obstacle(config):
        return unsuited
    if find_spec("triton.experimental.gluon") is None:
        return "the kernel for Hopper needs triton 3.6 or later"
    from tokenmill.model.kernels.triton.hopper import shape_obstacle

    spec = config.spec
    group = spec.num_heads // spec.num_kv_heads
    return shape_obstacle(config.platform.capability(), spec.head_dim, group, config.page_size)


def _flash(config: AttentionConfig) -> Parts:
    from tokenmill.model.attention.backends.flash import FlashAttention, find_flash

    attention = find_flash()
    assert attention is not None, "checked before"
    flash = FlashAttention(config.spec, attention)
    return flash, flash, None


def _flashinfer(config: AttentionConfig) -> Parts:
    from tokenmill.model.attention.backends.flashinfer import FlashInferAttention, FlashInferGraphs

    library = importlib.import_module("flashinfer")
    made = (config.spec, config.page_size, config.dtype, config.platform.device, library)
    return FlashInferAttention(*made), FlashInferAttention(*made), FlashInferGraphs(*made)


def _triton(config: AttentionConfig) -> Parts:
    from tokenmill.model.attention.backends.triton import TritonDecodes, TritonPrompts

    if config.is_invariant:
        return TritonPrompts(), TritonPrompts(are_single=config.platform.capability()[0] == 9), None
    from tokenmill.model.kernels.triton.splits import level_of

    num_units = config.platform.num_units()
    if config.devices is not None:
        from tokenmill.model.attention.backends.context import SharedDecodes, SharedPrompts

        gather = config.devices.gather
        return SharedPrompts(gather), SharedDecodes(config.spec, num_units, gather), None
    shares = config.shares_splits and not config.spec.is_windowed
    decodes = TritonDecodes(config.spec, num_units, config.page_size if shares else None, level_of(config.page_size))
    return TritonPrompts(), decodes, None


def _hopper(config: AttentionConfig) -> Parts:
    from tokenmill.model.attention.backends.triton import HopperPrompts

    return HopperPrompts(config.platform.num_units()), *_triton(config)[1:]


BACKENDS = (
    Backend(
        "native",
        _packed,
        make=_native,
        merit="packed KV",
        dtypes=("bfloat16",),
        kv_dtypes=("int8", "int4", "int8-int4"),
        head_multiple=16,
        max_head_dim=512,
        needs_native=True,
        obstacle=_native_obstacle,
        shares_context=True,
    ),
    Backend("cpu", _head_major, make=_cpu, merit="batched torch", package="torch", shares_context=True),
    Backend("reference", _head_major, make=_reference, auto_for=(never, never), package="torch"),
    Backend(
        "flashinfer",
        _token_major,
        make_paged=_flashinfer,
        auto_for=(lambda capability: capability[0] != HOPPER, always),
        merit="FlashInfer",
        package="flashinfer",
        obstacle=_flashinfer_obstacle,
    ),
    Backend(
        "hopper",
        _token_major,
        make_paged=_hopper,
        auto_for=(lambda capability: capability[0] == HOPPER, never),
        merit="its own kernel for Hopper",
        dtypes=("bfloat16", "float16"),
        obstacle=_hopper_obstacle,
    ),
    Backend(
        "flash",
        _token_major,
        make_paged=_flash,
        auto_for=(always, never),
        merit="torch's flash attention",
        dtypes=("bfloat16", "float16"),
        obstacle=_flash_obstacle,
    ),
    Backend(
        "triton",
        _token_major,
        make_paged=_triton,
        merit="its own kernels",
        obstacle=_alibi_obstacle,
        is_invariant=True,
        shares_context=True,
    ),
)
