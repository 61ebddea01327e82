"""The disk of several engines: each finds what the others have stored, and never takes other bytes for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.eventually import eventually
from tests.startup.assembly.test_kv_tiers import (
    KEY,
    PAGE_BYTES,
    PAGE_SIZE,
    SLOT_BYTES,
    Tier,
    fill,
    pages_file,
    tokens_of,
)
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.transfer.page_keys import page_keys


def content_of(tokens: np.ndarray, page: int) -> np.ndarray:
    """The bytes of a page, which follow from its tokens and those before them."""
    seed = np.frombuffer(tokens[: (page + 1) * PAGE_SIZE].tobytes(), dtype=np.uint32)
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def store(tier: Tier, tokens: np.ndarray) -> bool:
    num_pages = len(tokens) // PAGE_SIZE
    for page in range(num_pages):
        tier.memory.pages[1 + page] = content_of(tokens, page)
    return tier.save(tokens, [1 + page for page in range(num_pages)])


def loaded(tier: Tier, tokens: np.ndarray) -> int:
    """The number of pages that are loaded, each with the right bytes."""
    pages = [40 + page for page in range(len(tokens) // PAGE_SIZE)]
    tier.memory.pages[pages] = 0
    count = tier.load(tokens, pages)
    for page in range(count):
        assert np.array_equal(tier.memory.pages[pages[page]], content_of(tokens, page))
    return count


def test_an_engine_finds_what_another_stores_before_and_meanwhile(tmp_path: Path, rng: np.random.Generator) -> None:
    first, early, late = Tier(tmp_path), tokens_of(rng, 3), tokens_of(rng, 2)
    assert store(first, early)
    second = Tier(tmp_path, engine=1)
    assert second.found(early) == 3
    assert loaded(second, early) == 3
    assert second.found(late) == 0
    assert store(first, late)
    eventually(lambda: second.found(late) == 2)
    assert loaded(second, late) == 2
    assert store(second, early)
    assert second.disk.num_pages == 0, "what one has stored no other stores again"
    longer = np.concatenate([early, tokens_of(rng, 1)])
    assert store(second, longer)
    assert second.disk.num_pages == 1
    eventually(lambda: first.found(longer) == 4)
    assert loaded(first, longer) == 4
    first.disk.close()
    second.disk.close()


def test_another_server_of_the_model_has_files_of_its_own(tmp_path: Path, rng: np.random.Generator) -> None:
    tokens, first = tokens_of(rng, 2), Tier(tmp_path)
    second = Tier(tmp_path)
    assert store(second, tokens)
    eventually(lambda: first.found(tokens) == 2)
    second.disk.close()
    assert loaded(first, tokens) == 2, "files outlive their engine"
    first.disk.close()


def test_what_another_engine_has_written_over_is_a_miss(tmp_path: Path, rng: np.random.Generator) -> None:
    first, second, tokens = Tier(tmp_path, num_slots=3), Tier(tmp_path, engine=1), tokens_of(rng, 3)
    assert store(first, tokens)
    eventually(lambda: second.found(tokens) == 3)
    second.disk._pages._others.is_due = lambda: False  # type: ignore[attr-defined]
    assert store(first, tokens_of(rng, 2))
    assert second.found(tokens) == 3, "it has not looked yet"
    assert loaded(second, tokens) == 1
    assert second.found(tokens) == 1
    first.disk.close()
    second.disk.close()


@pytest.mark.parametrize("what", ["torn record", "other header", "no index", "no pages"])
def test_files_that_a_dying_engine_leaves_are_read_as_far_as_they_go(
    tmp_path: Path, rng: np.random.Generator, what: str
) -> None:
    dying, tokens, others = Tier(tmp_path), tokens_of(rng, 2), tokens_of(rng, 1)
    assert store(dying, tokens)
    assert store(dying, others)
    dying.disk._pages.store.close()
    (index,), (pages,) = tmp_path.glob("*-0.index"), tmp_path.glob("*-0.pages")
    if what == "torn record":
        index.write_bytes(index.read_bytes()[: -int(rng.integers(1, 20))])
    elif what == "other header":
        index.write_bytes(b"x" + index.read_bytes())
    elif what == "no index":
        index.unlink()
    engine = Tier(tmp_path, engine=1)
    if what == "no pages":
        assert engine.found(tokens) == 2
        pages.unlink()
        assert loaded(engine, tokens) == 0
    assert engine.found(tokens) == (2 if what == "torn record" else 0)
    assert engine.found(others) == (1 if what == "no pages" else 0)
    assert loaded(engine, tokens) == (2 if what == "torn record" else 0)
    engine.disk.close()


def test_a_reset_forgets_what_is_known_of_others(tmp_path: Path, rng: np.random.Generator) -> None:
    first, second, tokens, later = Tier(tmp_path), Tier(tmp_path, engine=1), tokens_of(rng, 2), tokens_of(rng, 1)
    assert store(first, tokens)
    eventually(lambda: second.found(tokens) == 2)
    second.disk.reset()
    assert second.found(tokens) == 0
    assert store(first, later)
    eventually(lambda: second.found(later) == 1)
    assert second.found(tokens) == 0
    first.disk.close()
    second.disk.close()


def test_engines_that_store_load_and_die_at_random_load_the_right_bytes(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    prompts = [tokens_of(rng, int(rng.integers(1, 5))) for _ in range(6)]
    prompts += [np.concatenate([prompt, tokens_of(rng, 2)]) for prompt in prompts[:3]]
    engines = [Tier(tmp_path, num_slots=int(rng.integers(4, 9)), engine=number) for number in range(3)]
    num_from_others = 0
    for _ in range(120):
        number, prompt = int(rng.integers(3)), prompts[rng.integers(len(prompts))]
        engine = engines[number]
        match rng.choice(["store", "store", "load", "load", "load", "die"], p=None):
            case "store":
                store(engine, prompt)
            case "load":
                own = sum(key in engine.disk._pages._slots for key, _ in page_keys_of(prompt))
                num_from_others += loaded(engine, prompt) > own
            case _:
                engine.disk._pages.store.close()
                engines[number] = Tier(tmp_path, num_slots=engine.disk.num_slots, engine=number)
        engines[number].found(prompt)
    assert num_from_others
    for engine in engines:
        engine.disk.close()


def page_keys_of(tokens: np.ndarray) -> list[tuple[bytes, bytes]]:
    return list(page_keys(KEY, tokens, PAGE_SIZE))


def test_a_folder_holds_so_many_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.engine.transfer.slot_file.MOST_ENGINES", 2)
    engines = [Tier(tmp_path) for _ in range(2)]
    with pytest.raises(InvalidConfig, match="2 engines store pages of this model there already"):
        Tier(tmp_path)
    for engine in engines:
        engine.disk.close()


@pytest.mark.parametrize("run_bytes", [1, 2 * PAGE_BYTES, 1 << 20])
def test_slots_in_any_order_are_read_together_where_they_lie_together(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, run_bytes: int
) -> None:
    """Some lie in the files of another engine; a damaged one ends the load wherever it stands in a run."""
    monkeypatch.setattr("tokenmill.engine.transfer.slot_table.RUN_BYTES", run_bytes)
    first, tokens, pages = Tier(tmp_path, 16), tokens_of(rng, 9), list(range(1, 10))
    content = fill(first, rng, pages)
    for number in rng.permutation(4):  # the slots of other prefixes, which are given back in another order
        first.save(tokens_of(rng, 1), [10 + int(number)])
    first.disk._pages._free.extend(rng.permutation(4).tolist())
    first.disk._pages._slots.clear()
    assert first.save(tokens[: 5 * PAGE_SIZE], pages[:5])
    second = Tier(tmp_path, 16, engine=1)
    second.memory.pages[:] = first.memory.pages
    assert second.found(tokens) == 5
    assert second.save(tokens, pages)
    assert second.disk.num_pages == 4, "the others are there already"
    second.memory.pages[:] = 0
    into = rng.permutation(np.arange(20, 29)).tolist()
    assert second.load(tokens, into) == 9
    assert np.array_equal(second.memory.pages[into], content)
    damaged = int(rng.integers(5))
    slots = second.disk.tables.find(KEY, tokens)
    with pages_file(tmp_path).with_name(f"{pages_file(tmp_path).name[:-7]}0.pages").open("r+b") as file:
        file.seek(slots[damaged].number * SLOT_BYTES + int(rng.integers(PAGE_BYTES - 8)))
        file.write(rng.bytes(8))
    assert second.load(tokens, into) == damaged
    for tier in (first, second):
        tier.disk.close()
