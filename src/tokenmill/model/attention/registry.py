"""The choice of attention backends from the rows of the registry, with its reason; and what cannot serve, refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.core.errors import InvalidConfig
from tokenmill.model.attention.backend import AttentionConfig, Backend, names_of
from tokenmill.model.attention.backend_rows import BACKENDS
from tokenmill.model.attention.context_step import num_own_pages
from tokenmill.model.attention.groups import GroupedAttention, GroupedPagedAttention
from tokenmill.model.attention.packed_kv import PackedKV
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.platform.arrays import ArrayLibrary
from tokenmill.platform.prefault import begin_small


class AttentionChoice(msgspec.Struct, frozen=True):
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

    @property
    def num_layers(self) -> int:
        """Number of layers with keys and values of their own."""
        return sum(spec.num_layers for spec in self.config.spec.groups)

    def _bytes_per_page(self, are_windowed: bool) -> int:
        config, layout = self.config, self.prompts.layout()
        shape = config.page_size, config.kv_dtype or config.dtype
        groups = [spec for spec in config.spec.groups if spec.is_windowed == are_windowed]
        return sum(layout.bytes_per_page(spec, *shape) for spec in groups)

    def make(self, num_pages: int, num_window_pages: int = 0, arrays: ArrayLibrary | None = None) -> AttentionBackend:
        """Make the backend with its KV cache.

        Args:
            num_pages: pages of the cache, including page 0 for padding. num_window_pages: those of the window group.
            arrays: the library that its memory comes from, instead of the device's own; for native attention.

        Raises:
            InvalidConfig: this backend cannot take such memory.
        """
        sizes = (num_pages, num_window_pages)
        backends = [self._make(config, sizes[config.spec.is_windowed], arrays) for config in self.config.groups]
        if len(backends) == 1:
            return backends[0]
        are_windowed = [config.spec.is_windowed for config in self.config.groups]
        if not self.prompts.is_for_gpus:
            return GroupedAttention(backends, are_windowed)
        from tokenmill.model.attention.paged import PagedAttention

        return GroupedPagedAttention([one for one in backends if isinstance(one, PagedAttention)], are_windowed)

    def _make(self, config: AttentionConfig, num_pages: int, arrays: ArrayLibrary | None) -> AttentionBackend:
        """Make the backend of a group."""
        prompts, decodes = self.prompts, self.decodes
        if arrays is not None and prompts.layout() is not PackedKV:
            raise InvalidConfig("KV from elsewhere needs native attention, or an engine of one rank")
        if config.devices is not None:
            num_pages = num_own_pages(num_pages, config.devices.size)
        shape = (config.spec, num_pages, config.page_size, config.kv_dtype or config.dtype)
        place = *shape, config.platform.device
        take = None if config.ranks is None else config.ranks.take
        if arrays is None:
            kv = prompts.layout()(*place, is_page_first=config.is_page_first, take=take)
        else:
            kv = PackedKV(*place, is_page_first=config.is_page_first, arrays=arrays)
        if not prompts.is_for_gpus:
            begin_small(kv.pieces)
        if prompts.make is not None:
            return prompts.make(config, kv)
        from tokenmill.model.attention.paged import PagedAttention
        from tokenmill.model.attention.tensor_kv import TokenMajorKV

        assert isinstance(kv, TokenMajorKV) and prompts.make_paged and decodes.make_paged, "a hybrid is for GPUs"
        parts = prompts.make_paged(config)[0], *decodes.make_paged(config)[1:]
        return PagedAttention(kv, *parts, sees_spans=config.spec.spans_see_ahead)


def choose_attention(name: str, config: AttentionConfig) -> AttentionChoice:
    """Choose the attention backends; takes no memory.

    Args:
        name: a backend, `auto`, or on a GPU two backends as `flash,triton`: for prompts, for decodes.

    Raises:
        InvalidConfig: the backend is unknown, or cannot serve here.
    """
    if config.is_page_first and config.platform.is_accelerator:
        raise InvalidConfig("--kv-layout page-first is for CPUs: the kernels of GPUs read layer-first KV; leave it out")
    rows = [row for row in BACKENDS if row.is_for_gpus == config.platform.is_accelerator]
    if config.is_invariant:
        rows = [row for row in rows if row.is_invariant]
        if name not in ("auto", *(row.name for row in rows)):
            raise InvalidConfig(f"--batch-invariant runs on attention backend {rows[0].name}, not {name}")
        choice = AttentionChoice(config, rows[0], rows[0], "sums in one order, for --batch-invariant")
    elif name == "auto":
        (prompts, reason), (decodes, _) = (_automatic(rows, config, part) for part in range(2))
        if decodes is not prompts:
            reason = f"{reason}; {decodes.merit} for decodes"
        choice = AttentionChoice(config, prompts, decodes, reason)
    else:
        choice = _named(name, rows, config)
    _check_kv_dtype(choice.prompts, rows, config)
    if config.devices is None:
        return choice
    how = f"pages over {config.devices.size} GPUs, so without CUDA graphs"
    return msgspec.structs.replace(choice, reason=f"{choice.reason}; {how}")


def _automatic(rows: Sequence[Backend], config: AttentionConfig, part: int) -> tuple[Backend, str]:
    """Return the first row that serves prompts (part 0) or decodes (1), and its merit with earlier rows' obstacles."""
    passed: list[str] = []
    capability = config.platform.capability()
    for row in rows:
        if row.auto_for[part](capability):
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
        raise InvalidConfig(f"--kv-cache-dtype {names_of([wanted])} is for {devices}")
    obstacle = able[0].why_not(config) or "another backend is asked for"
    raise InvalidConfig(f"--kv-cache-dtype needs the {able[0].name} attention: {obstacle}")
