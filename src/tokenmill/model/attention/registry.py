"""The attention backends: one row each with its requirements, from which `auto` picks and refusals are explained."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenmill.core.errors import InvalidConfig
from tokenmill.model.attention.groups import GroupedAttention, GroupedPagedAttention
from tokenmill.model.attention.protocol import AttentionBackend, AttentionSpec, KVCache
from tokenmill.platform.protocol import Platform

if TYPE_CHECKING:
    from tokenmill.model.attention.paged import PagedImplementation

    Parts = tuple[PagedImplementation, PagedImplementation, PagedImplementation | None]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The requirements that the attention has to meet.

    Attributes:
        dtype: name of the dtype of the model, e.g. `bfloat16`.
        kv_dtype: that of the KV cache, if it differs.
        native: the native kernels (`_native.Kernels`), if the model runs on them.
        is_invariant: require a token's result to depend neither on its batch nor on the chunk that it came in.
        shares_splits: read keys that decodes have in common once for all of them, where the backend can.
    """

    spec: AttentionSpec
    page_size: int
    dtype: str
    platform: Platform
    kv_dtype: str | None = None
    native: Any = None
    is_invariant: bool = False
    shares_splits: bool = True

    @property
    def groups(self) -> list[AttentionConfig]:
        """The same config for each group of layers."""
        return [self] if not self.spec.others else [replace(self, spec=spec) for spec in self.spec.groups]


@dataclass(frozen=True, slots=True)
class Backend:
    """A row of the registry. A field that is left out is no condition. Its functions import what it needs where it is
    taken: torch takes a second, and may be absent.

    Attributes:
        layout: returns the layout of its KV cache.
        make: makes the backend over its KV cache; for CPUs.
        make_paged: makes the implementations for prompts, for decodes, and for decodes in CUDA graphs if that is
            another one; for GPUs, see `PagedAttention`.
        auto_for: whether `auto` may take it for prompts, and for decodes; earlier rows are better.
        merit: the reason for which `auto` takes it.
        dtypes: supported dtypes of the model. kv_dtypes: those of its KV cache besides the model's.
        package: package that must be installed, under this name here and as an extra of this project.
        obstacle: a check that needs a try; returns the reason against the backend, or None.
        is_invariant: see `AttentionConfig`.
    """

    name: str
    layout: Callable[[], type[KVCache]]
    make: Callable[[AttentionConfig, Any], AttentionBackend] | None = None
    make_paged: Callable[[AttentionConfig], Parts] | None = None
    auto_for: tuple[bool, bool] = (True, True)
    merit: str = ""
    dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    page_multiple: int = 1
    head_multiple: int = 1
    max_head_dim: int | None = None
    needs_native: bool = False
    package: str | None = None
    obstacle: Callable[[AttentionConfig], str | None] = lambda config: None
    is_invariant: bool = False

    @property
    def is_for_gpus(self) -> bool:
        """True for a backend that runs on accelerators only."""
        return self.make_paged is not None

    def why_not(self, config: AttentionConfig) -> str | None:
        """Return the reason that the backend cannot serve some group of layers; None if it can serve all."""
        return next(filter(None, map(self._why_not, config.groups)), None)

    def _why_not(self, config: AttentionConfig) -> str | None:
        head_dim, multiple = config.spec.head_dim, self.head_multiple
        if self.dtypes and config.dtype not in self.dtypes:
            return f"the {self.name} attention is for {_names(self.dtypes)}, not {_names([config.dtype])}"
        if config.page_size % self.page_multiple:
            needed = f"a page size that is a multiple of {self.page_multiple}, not {config.page_size}"
            return f"the {self.name} attention needs {needed}"
        if head_dim % multiple or (self.max_head_dim is not None and head_dim > self.max_head_dim):
            needed = f"heads of a multiple of {multiple} up to {self.max_head_dim}, not {head_dim}"
            return f"the {self.name} attention needs {needed}"
        if self.needs_native and config.native is None:
            return "the model does not run on native kernels"
        if self.package is not None and not _is_installed(self.package):
            return f"{self.package} is not installed (pip install tokenmill[{self.package}])"
        return self.obstacle(config)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backends for prompts and for decodes (the same one on a CPU), and a clause that gives the reason."""

    config: AttentionConfig
    prompts: Backend
    decodes: Backend
    reason: str

    @property
    def name(self) -> str:
        """Name of the backend, or of the two of a hybrid, as on the command line."""
        return ",".join(dict.fromkeys((self.prompts.name, self.decodes.name)))

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page of the KV cache, over all groups of layers except the window group."""
        return self._bytes_per_page(False)

    @property
    def bytes_per_window_page(self) -> int:
        """Bytes of a page of the window group; 0 without one."""
        return self._bytes_per_page(True)

    def _bytes_per_page(self, are_windowed: bool) -> int:
        config, layout = self.config, self.prompts.layout()
        shape = config.page_size, config.kv_dtype or config.dtype
        groups = [spec for spec in config.spec.groups if spec.is_windowed == are_windowed]
        return sum(layout.bytes_per_page(spec, *shape) for spec in groups)

    def make(self, num_pages: int, num_window_pages: int = 0) -> AttentionBackend:
        """Make the backend with its KV cache.

        Args:
            num_pages: pages of the cache, including page 0 for padding. num_window_pages: those of the window group.
        """
        sizes = (num_pages, num_window_pages)
        backends = [self._make(config, sizes[config.spec.is_windowed]) for config in self.config.groups]
        if len(backends) == 1:
            return backends[0]
        if not self.prompts.is_for_gpus:
            return GroupedAttention(backends, [config.spec.is_windowed for config in self.config.groups])
        from tokenmill.model.attention.paged import PagedAttention

        return GroupedPagedAttention([one for one in backends if isinstance(one, PagedAttention)])

    def _make(self, config: AttentionConfig, num_pages: int) -> AttentionBackend:
        """Make the backend of a group."""
        prompts, decodes = self.prompts, self.decodes
        shape = (config.spec, num_pages, config.page_size, config.kv_dtype or config.dtype)
        kv = prompts.layout()(*shape, config.platform.device)
        if prompts.make is not None:
            return prompts.make(config, kv)
        from tokenmill.model.attention.paged import PagedAttention
        from tokenmill.model.attention.tensor_kv import TokenMajorKV

        assert isinstance(kv, TokenMajorKV) and prompts.make_paged and decodes.make_paged, "a hybrid is for GPUs"
        return PagedAttention(kv, prompts.make_paged(config)[0], *decodes.make_paged(config)[1:])


def choose_attention(name: str, config: AttentionConfig) -> AttentionChoice:
    """Choose the attention backends; takes no memory.

    Args:
        name: a backend, `auto`, or on a GPU two backends as `flash,triton`: for prompts, for decodes.

    Raises:
        InvalidConfig: the backend is unknown, or cannot serve here.
    """
    rows = [row for row in BACKENDS if row.is_for_gpus == config.platform.is_accelerator]
    if config.is_invariant:
        rows = [row for row in rows if row.is_invariant]
        if name not in ("auto", *(row.name for row in rows)):
            raise InvalidConfig(f"--batch-invariant runs on attention backend {rows[0].name}, not {name}")
        choice = AttentionChoice(config, rows[0], rows[0], "sums in one order, for --batch-invariant")
    elif name == "auto":
        prompts, reason = _automatic(rows, config, 0)
        choice = AttentionChoice(config, prompts, _automatic(rows, config, 1)[0], reason)
    else:
        choice = _named(name, rows, config)
    _check_kv_dtype(choice.prompts, rows, config)
    return choice


def _automatic(rows: Sequence[Backend], config: AttentionConfig, part: int) -> tuple[Backend, str]:
    """Return the first row that serves prompts (part 0) or decodes (1), and its merit with earlier rows' obstacles."""
    passed: list[str] = []
    for row in rows:
        if row.auto_for[part]:
            obstacle = row.why_not(config)
            if obstacle is None:
                return row, ": ".join(filter(None, (_merit(row, config), *passed)))
            passed.append(obstacle)
    raise InvalidConfig(f"no attention backend can serve here: {'; '.join(passed)}")


def _named(name: str, rows: Sequence[Backend], config: AttentionConfig) -> AttentionChoice:
    by_name = {row.name: row for row in rows}
    names, is_gpu = name.split(","), config.platform.is_accelerator
    if len(names) > 1 + is_gpu or not set(names) <= by_name.keys():
        hybrid = ", or two as flash,triton: for prompts and for decodes" if is_gpu else ""
        raise InvalidConfig(
            f"--attention-backend {name} is unknown on {config.platform.name}; choose auto, one of "
            f"{', '.join(by_name)}{hybrid}"
        )
    for part in names:
        obstacle = by_name[part].why_not(config)
        if obstacle is not None:
            raise InvalidConfig(f"--attention-backend {part}: {obstacle}")
    prompts = by_name[names[0]]
    reason = _merit(prompts, config) if prompts.needs_native else "asked for"
    return AttentionChoice(config, prompts, by_name[names[-1]], reason)


def _merit(row: Backend, config: AttentionConfig) -> str:
    return f"{row.merit}, {config.native.isa}" if row.needs_native and config.native is not None else row.merit


def _check_kv_dtype(chosen: Backend, rows: Sequence[Backend], config: AttentionConfig) -> None:
    wanted = config.kv_dtype
    if wanted in (None, config.dtype, *chosen.kv_dtypes):
        return
    able = [row for row in rows if wanted in row.kv_dtypes]
    if not able:
        devices = "CPUs" if config.platform.is_accelerator else "GPUs"
        raise InvalidConfig(f"--kv-cache-dtype {_names([wanted])} is for {devices}")
    obstacle = able[0].why_not(config) or "another backend is asked for"
    raise InvalidConfig(f"--kv-cache-dtype needs the {able[0].name} attention: {obstacle}")


def _names(dtypes: Sequence[str | None]) -> str:
    return " and ".join(map(str, dtypes))


def _is_installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


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

    return NativeAttention(config.spec, kv, config.native)


def _cpu(config: AttentionConfig, kv: Any) -> AttentionBackend:
    from tokenmill.model.attention.backends.cpu import CpuAttention

    return CpuAttention(config.spec, kv)


def _reference(config: AttentionConfig, kv: Any) -> AttentionBackend:
    from tokenmill.model.attention.backends.reference import ReferenceAttention

    return ReferenceAttention(config.spec, kv)


def _no_sinks(config: AttentionConfig) -> str | None:
    return "it has no sinks, which this model's attention has" if config.spec.has_sinks else None


def _flash_obstacle(config: AttentionConfig) -> str | None:
    from tokenmill.model.attention.backends.flash import flash_obstacle

    return _no_sinks(config) or flash_obstacle(config.spec, config.page_size, config.dtype, config.platform.device)


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
    platform, page_size = config.platform, config.page_size if config.shares_splits else None
    return TritonPrompts(), TritonDecodes(config.spec, platform.num_units(), platform.device, page_size), None


BACKENDS = (
    Backend(
        "native",
        _packed,
        make=_native,
        merit="packed KV",
        dtypes=("bfloat16",),
        kv_dtypes=("int8",),
        page_multiple=16,
        head_multiple=16,
        max_head_dim=512,
        needs_native=True,
    ),
    Backend("cpu", _head_major, make=_cpu, merit="batched torch", package="torch"),
    Backend("reference", _head_major, make=_reference, auto_for=(False, False), package="torch"),
    Backend(
        "flash",
        _token_major,
        make_paged=_flash,
        auto_for=(True, False),
        merit="flash for prompts, its own split decodes",
        dtypes=("bfloat16", "float16"),
        obstacle=_flash_obstacle,
    ),
    Backend(
        "flashinfer",
        _token_major,
        make_paged=_flashinfer,
        auto_for=(False, False),
        package="flashinfer",
        obstacle=_no_sinks,
    ),
    Backend("triton", _token_major, make_paged=_triton, is_invariant=True),
)
