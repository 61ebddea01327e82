"""The settings that a backend of attention must serve, and a row of the registry. Imports no backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.model.attention.protocol import AttentionBackend, AttentionSpec, KVCache
from tokenmill.platform.protocol import Platform
from tokenmill.platform.torch_package import needs_package

if TYPE_CHECKING:
    from tokenmill.model.attention.context import ContextRanks
    from tokenmill.model.attention.context_step import ContextDevices
    from tokenmill.model.attention.paged import PagedImplementation

    Parts = tuple[PagedImplementation, PagedImplementation, PagedImplementation | None]


class AttentionConfig(msgspec.Struct, frozen=True):
    """The requirements that the attention has to meet.

    Attributes:
        dtype: name of the dtype of the model, e.g. `bfloat16`.
        kv_dtype: that of the KV cache, if it differs.
        native: the native kernels (`_native.Kernels`), if the model runs on them.
        is_invariant: require a token's result to depend neither on its batch nor on the chunk that it came in.
        shares_splits: read keys that decodes have in common once for all of them, where the backend can.
        is_page_first: all layers of a page lie together, see `KVCache`.
        ranks: share the attention and its KV memory; None: it is one rank's.
        devices: over which the pages of the KV memory are spread; None: it is one device's.
    """

    spec: AttentionSpec
    page_size: int
    dtype: str
    platform: Platform
    kv_dtype: str | None = None
    native: Any = None
    is_invariant: bool = False
    shares_splits: bool = True
    is_page_first: bool = False
    ranks: ContextRanks | None = None
    devices: ContextDevices | None = None

    @property
    def groups(self) -> list[AttentionConfig]:
        """The same config for each group of layers."""
        return (
            [self] if not self.spec.others else [msgspec.structs.replace(self, spec=spec) for spec in self.spec.groups]
        )


def always(capability: tuple[int, int]) -> bool:
    """Return True on every device."""
    return True


def never(capability: tuple[int, int]) -> bool:
    """Return False on every device."""
    return False


class Backend(msgspec.Struct, frozen=True):
    """A row of the registry. A field that is left out is no condition. Its functions import what it needs where it is
    taken: torch takes a second, and may be absent.

    Attributes:
        layout: returns the layout of its KV cache.
        make: makes the backend over its KV cache; for CPUs.
        make_paged: makes the implementations for prompts, for decodes, and for decodes in CUDA graphs if that is
            another one; for GPUs, see `PagedAttention`.
        auto_for: whether `auto` may take it for prompts, and for decodes, on a device of a capability; earlier rows
            are better.
        merit: the words for it where `auto` takes it.
        dtypes: supported dtypes of the model. kv_dtypes: those of its KV cache besides the model's.
        package: package that must be installed, under this name here and as an extra of this project.
        obstacle: a check that needs a try; returns the reason against the backend, or None.
        is_invariant: see `AttentionConfig`.
        shares_context: serves ranks that share a context.
    """

    name: str
    layout: Callable[[], type[KVCache]]
    make: Callable[[AttentionConfig, Any], AttentionBackend] | None = None
    make_paged: Callable[[AttentionConfig], Parts] | None = None
    auto_for: tuple[Callable[[tuple[int, int]], bool], Callable[[tuple[int, int]], bool]] = (always, always)
    merit: str = ""
    dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    head_multiple: int = 1
    max_head_dim: int | None = None
    needs_native: bool = False
    package: str | None = None
    obstacle: Callable[[AttentionConfig], str | None] = lambda config: None
    is_invariant: bool = False
    shares_context: bool = False

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
            return f"the {self.name} attention is for {names_of(self.dtypes)}, not {names_of([config.dtype])}"
        if head_dim % multiple or (self.max_head_dim is not None and head_dim > self.max_head_dim):
            needed = f"heads of a multiple of {multiple} up to {self.max_head_dim}, not {head_dim}"
            return f"the {self.name} attention needs {needed}"
        if (config.ranks or config.devices) is not None and not self.shares_context:
            able = "triton" if self.is_for_gpus else "native or cpu"
            return f"the {self.name} attention is one rank's: --context-parallel-size needs {able}"
        if self.needs_native and config.native is None:
            return "the model does not run on native kernels"
        if self.package is not None and not _is_installed(self.package):
            return f"the {self.name} attention {needs_package(self.package, self.package)}"
        return self.obstacle(config)


def names_of(dtypes: Sequence[str | None]) -> str:
    """Return dtypes in words."""
    return " and ".join(map(str, dtypes))


def _is_installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True
