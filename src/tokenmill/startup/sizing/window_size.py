"""Divide KV memory for a model whose layers with a window have pages of their own, and decide whether they have.

Both groups should run out at about the same time for requests of `TYPICAL_WINDOWS` windows: each takes its pages in
both, longer ones only more full pages. Memory is divided for as many of these as fit, `--max-num-seqs` at most. Pages
that the windows of these requests never use go to the full pages, and full pages that they never use go to windows
behind which prefixes are found: with much memory and few rows as many are found as with whole pages. One request of the
full context comes first: if it does not fit so, the windows get only the pages that one request needs.

Knows numbers of bytes, no devices.
"""

from __future__ import annotations

import dataclasses

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.kv_transfer import own_sources_have
from tokenmill.core.scheduling import Feature
from tokenmill.core.sizes import size_text
from tokenmill.engine.kv.page_pool import RESERVED_PAGES
from tokenmill.engine.kv.window_pages import WindowSettings, most_window_pages, num_pages_ahead
from tokenmill.engine.scheduler.scheduler import find_scheduler
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.startup.sizing.kv_size import (
    SMALLEST_CONTEXT,
    KVSize,
    bytes_of,
    decide_kv_size,
    kv_share,
    wanted_context,
)

# Requests of so many windows find both groups equally large. More would favour the long ones: a request shorter than
# its window takes as many pages of the window group as of the full one.
TYPICAL_WINDOWS = 4


class PageBytes(msgspec.Struct, frozen=True):
    """Bytes of a page over the layers of each group. `window`: tokens; 0: there is no window group."""

    full: int
    windowed: int = 0
    window: int = 0

    @property
    def both(self) -> int:
        """Bytes of a page in both groups: its size in a single group."""
        return self.full + self.windowed


def window_group_obstacle(config: EngineConfig, architecture: Architecture, has_draft_model: bool) -> str | None:
    """Return why layers with a window have no page group of their own; None: they have one. "": no windows."""
    windows = [attention.window for attention in architecture.attentions]
    widest = max((window for window in windows if window is not None), default=0)
    if not widest or not architecture.needs_kv:
        return ""
    sources_serve = config.num_ranks > 1 or own_sources_have(
        "serves_windows", config.kv_source, config.kv_transfer_config
    )
    obstacles = {
        "--disable-hybrid-kv-cache-manager": config.disable_hybrid_kv_cache_manager,
        "--scheduler-cls does not serve them": Feature.WINDOWS not in find_scheduler(config.scheduler_cls).serves,
        "recurrent states are kept beside them": bool(architecture.recurrences),
        "every layer has a window": all(windows),
        "no request is longer than a window": wanted_context(config, architecture.max_position) <= widest,
        "a source of your own knows whole pages: it does not say serves_windows": not sources_serve,
        "several ranks share the model": config.num_ranks > 1,
        "a draft model has pages beside them": has_draft_model,
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


def describe_windows(obstacle: str | None, page: PageBytes, size: KVSize, page_size: int) -> str:
    """Describe how pages behind windows are handled, for the start-up report; "": the model has no windows."""
    if size.window is None:
        return f"pages behind sliding windows are kept: {obstacle}" if obstacle else ""
    own = f"{size.window.num_pages:,} pages for sliding windows of {page.window:,} tokens"
    return f"{own}: {size_text(page.windowed / page_size)} a token, {size_text(page.full / page_size)} in the others"


def decide_grouped_size(config: EngineConfig, max_position: int, page: PageBytes, available_bytes: int) -> KVSize:
    """Size the KV cache like `decide_kv_size`, with window pages beside the full ones.

    Raises:
        InvalidConfig: one full request does not fit.
    """
    size, wanted = config.page_size, wanted_context(config, max_position)
    longest, typical = -(-wanted // size), -(-min(wanted, TYPICAL_WINDOWS * page.window) // size)
    most = most_window_pages(page.window, size)
    ahead = _num_besides(config, page.window)
    least = min(most, longest) + ahead
    if config.num_pages is not None:
        num_rows = min(config.max_num_seqs, -(-config.num_pages // typical))
        found = decide_kv_size(config, max_position, page.full, available_bytes)
        num_windows = num_rows * min(most, typical) + ahead + max(0, config.num_pages - longest * config.max_num_seqs)
        return _with_windows(config, found, page, max(num_windows, least))

    share = kv_share(config, available_bytes)
    per_row = typical * page.full + min(most, typical) * page.windowed
    room = share - RESERVED_PAGES * page.both - ahead * page.windowed
    num_windows = max(1, min(config.max_num_seqs, room // per_row)) * min(most, typical) + ahead
    if _full_pages(share, page, num_windows) < longest:
        num_windows = least
    elif _full_pages(share, page, num_windows) > longest * config.max_num_seqs:
        besides = bytes_of(longest * config.max_num_seqs, page.full)
        num_windows = (share - besides) // page.windowed - RESERVED_PAGES
    # With as many pages in both a page of the full group always finds one of the other.
    num_windows = max(1, min(num_windows, share // page.both - RESERVED_PAGES))
    besides = bytes_of(num_windows, page.windowed)
    parted = dataclasses.replace(config, kv_cache_memory_bytes=max(0, share - besides))
    found = decide_kv_size(parted, max_position, page.full, 0, besides)
    if config.kv_cache_memory_bytes is None:
        found = msgspec.structs.replace(found, num_pages=min(found.num_pages, longest * config.max_num_seqs))
    return _with_windows(config, found, page, num_windows)


def pages_of_one(config: EngineConfig, num_tokens: int, window: int) -> tuple[int, int]:
    """Return the pages that one request of `num_tokens` needs, launched steps included: full pages, window pages."""
    num_pages = -(-num_tokens // config.page_size)
    return num_pages, min(num_pages, most_window_pages(window, config.page_size) + _num_besides(config, window))


def least_page_bytes(config: EngineConfig, max_position: int, page: PageBytes) -> int:
    """Return the bytes per page of the smallest usable KV cache, with its share of the window pages.

    Raises:
        InvalidConfig: see `decide_grouped_size`.
    """
    if config.num_pages is not None:
        size = decide_grouped_size(config, max_position, page, 0)
        num_pages, num_windows = size.num_allocated, size.num_allocated_windows
    else:
        tokens = config.max_model_len or min(SMALLEST_CONTEXT, max_position)
        num_pages, num_windows = pages_of_one(config, tokens, page.window)
    return page.full + -(-page.windowed * num_windows // num_pages)


def _full_pages(share: int, page: PageBytes, num_windows: int) -> int:
    return (share - bytes_of(num_windows, page.windowed)) // page.full - RESERVED_PAGES


def _with_windows(config: EngineConfig, size: KVSize, page: PageBytes, num_windows: int) -> KVSize:
    num_for_saves = _num_for_saves(config, page.window)
    window = WindowSettings(page.window, min(num_windows, size.num_pages), num_for_saves)
    return msgspec.structs.replace(size, window=window)


def _num_besides(config: EngineConfig, window: int) -> int:
    """Return the window pages besides those that requests are promised: for launched steps and for saves."""
    ahead = num_pages_ahead(config.num_steps_ahead * config.step_budget, config.page_size)
    return ahead + _num_for_saves(config, window)


def _num_for_saves(config: EngineConfig, window: int) -> int:
    """Return the window pages of one save, if KV goes anywhere: one can go on while all others are promised."""
    return most_window_pages(window, config.page_size) if config.has_kv_sources else 0
