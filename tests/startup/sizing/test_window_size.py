"""Divide memory between full pages and those of layers with a window. The shape is Gemma 3 4B's."""

from __future__ import annotations

import pytest

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.kv.window_pages import WindowSettings, most_window_pages
from tokenmill.startup.sizing.kv_size import KVSize, bytes_of
from tokenmill.startup.sizing.window_size import PageBytes, decide_grouped_size, least_page_bytes, pages_of_one

LAYER = 2 * 4 * 256 * 2 * 16  # a page of 16 tokens in bfloat16
PAGE = PageBytes(5 * LAYER, 29 * LAYER, 1024)
CONTEXT = 32 * 1024
MIB = 1 << 20


def config_of(**flags: object) -> EngineConfig:
    return EngineConfig(device="cpu", max_num_batched_tokens=512, **flags).resolve()  # type: ignore[arg-type]


def size(available: int = 1 << 40, **flags: object) -> KVSize:
    return decide_grouped_size(config_of(**flags), CONTEXT, PAGE, available)


def bytes_taken(found: KVSize) -> int:
    assert found.window is not None
    return bytes_of(found.num_pages, PAGE.full) + bytes_of(found.window.num_pages, PAGE.windowed)


def test_one_request_of_the_full_context_takes_a_window_and_a_step_beside_its_full_pages() -> None:
    num_pages, num_windows = pages_of_one(config_of(), CONTEXT, PAGE.window)
    assert num_pages == CONTEXT // 16
    assert num_windows == most_window_pages(1024, 16) + 512 // 16
    given = bytes_of(num_pages, PAGE.full) + bytes_of(num_windows, PAGE.windowed)
    assert given < 821 * MIB < bytes_of(num_pages, PAGE.both) // 5
    assert size(kv_cache_memory_bytes=given, max_model_len=CONTEXT) == KVSize(
        num_pages, CONTEXT, window=WindowSettings(PAGE.window, num_windows)
    )


def test_what_no_row_could_use_is_for_prefixes_in_both_groups() -> None:
    most = 2 * CONTEXT // 16
    ample = size(max_num_seqs=2)
    assert ample.window is not None
    assert ample.num_pages == ample.window.num_pages == most
    given = bytes_of(most, PAGE.full) + bytes_of(most // 2, PAGE.windowed)
    some = size(max_num_seqs=2, kv_cache_memory_bytes=given)
    assert some.window is not None
    assert (some.num_pages, some.window.num_pages) == (most, most // 2)
    asked = size(max_num_seqs=2, num_pages=most + 1000)
    assert asked.window is not None
    assert most // 2 > asked.window.num_pages > 1000


def test_a_save_has_the_pages_of_a_window_for_itself_beside_a_store() -> None:
    alone, beside = size(num_pages=4 * CONTEXT // 16), size(num_pages=4 * CONTEXT // 16, kv_disk="/kv")
    assert alone.window is not None
    assert beside.window is not None
    most = most_window_pages(PAGE.window, 16)
    assert (alone.window.num_for_saves, beside.window.num_for_saves) == (0, most)
    assert beside.window.num_pages == alone.window.num_pages + most


@pytest.mark.parametrize("gibibytes", [1, 2, 8, 32])
def test_no_more_is_taken_than_was_given_and_little_is_left(gibibytes: int) -> None:
    given = gibibytes * 1024 * MIB
    assert given - PAGE.both < bytes_taken(size(kv_cache_memory_bytes=given)) <= given


def test_a_context_that_does_not_fit_is_refused_with_what_it_needs() -> None:
    with pytest.raises(InvalidConfig, match="--kv-cache-memory-bytes to") as refused:
        size(kv_cache_memory_bytes=700 * MIB, max_model_len=CONTEXT)
    needed = int(str(refused.value).split("--kv-cache-memory-bytes to ")[1].split(",")[0])
    assert size(kv_cache_memory_bytes=needed, max_model_len=CONTEXT).max_model_len == CONTEXT
    with pytest.raises(InvalidConfig):
        size(kv_cache_memory_bytes=needed - PAGE.full, max_model_len=CONTEXT)


@pytest.mark.parametrize("num_pages", [40, 100, 2048, 20_000])
def test_pages_that_are_asked_for_are_full_ones(num_pages: int) -> None:
    found = size(num_pages=num_pages)
    assert found.num_pages == num_pages
    assert found.window is not None
    assert 0 < found.window.num_pages <= num_pages


@pytest.mark.parametrize("flags", [{"max_model_len": CONTEXT}, {"num_pages": 4096}, {}])
def test_what_is_checked_before_loading_counts_windows_once(flags: dict[str, int]) -> None:
    found = least_page_bytes(config_of(**flags), CONTEXT, PAGE)
    assert PAGE.full < found <= PAGE.both
    if "max_model_len" in flags:
        assert found * CONTEXT // 16 < 820 * MIB
