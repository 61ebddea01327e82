"""Conversations as files: each goes on in another engine bit for bit; what is damaged or foreign is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.loop.kv_talks import ENGINE, SERVED, WINDOWED, Talk
from tests.engine.loop.test_kv_matrix import talks
from tests.model.kernels.native import ISAS
from tests.seeding import seed_for
from tests.tiers import some
from tokenmill import LLM
from tokenmill.core.engine_messages import SlotSeen
from tokenmill.core.messages import ActOnSlot
from tokenmill.core.request import CacheKey
from tokenmill.engine.kv.window_pages import pages_of_window
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.scheduler.resources.windows import Windows
from tokenmill.engine.transfer.sessions import Conversations, SlotActions

SEED = seed_for(__name__)
KEY = CacheKey("model")
__all__ = ["talks"]
pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")


def act(engine: Engine, slot: int, action: str, file: str = "") -> SlotSeen:
    """Have something done with a slot, and wait for its end."""
    ticket = f"{time.monotonic_ns()}"
    while True:
        seen = engine.answer(ActOnSlot("", slot, action, file, ticket))
        assert isinstance(seen, SlotSeen)
        if seen.is_done:
            return seen
        engine.step()
        time.sleep(0.005)


def open_engine(talk: Talk, folder: Path, **more: Any) -> AbstractContextManager[Engine]:
    return talk.open(slot_save_path=str(folder), **more)


def save(talk: Talk, folder: Path, **more: Any) -> SlotSeen:
    with open_engine(talk, folder, **more) as engine:
        talk.ask(engine, talk.first)
        return act(engine, 0, "save", "talk")


@pytest.mark.parametrize("served", some(list(SERVED), 3))
def test_a_conversation_goes_on_from_its_file(talks: Callable[[str], Talk], served: str, tmp_path: Path) -> None:
    talk = talks(served)
    saved = save(talk, tmp_path)
    assert not saved.error
    assert saved.num_bytes == (tmp_path / "talk").stat().st_size
    with open_engine(talk, tmp_path) as engine:
        restored = act(engine, 1, "restore", "talk")
        assert (restored.num_tokens, restored.num_bytes) == (saved.num_tokens, saved.num_bytes)
        reply, num_cached = talk.ask(engine, talk.second)
        again = act(engine, 1, "save", "again")
    assert reply == talk.reply, f"seed {SEED}"
    assert num_cached >= 0.95 * (len(talk.second) - 10)
    assert again.num_tokens > saved.num_tokens, "it has gone on in its slot"


@pytest.mark.parametrize("served", some(WINDOWED, 2))
def test_a_file_has_of_windows_what_the_next_turn_reads(
    talks: Callable[[str], Talk], served: str, tmp_path: Path
) -> None:
    """At its end, and where the last prompt ended: a template may write the reply in another way."""
    talk = talks(served)
    other = [*talk.first, *reversed(talk.first[-40:])]
    expected, _ = talk.say(other)
    save(talk, tmp_path)
    with open_engine(talk, tmp_path) as engine:
        actions = engine.extension(SlotActions)
        assert actions is not None
        file = actions._files.form.read(tmp_path / "talk")
        reached = pages_of_window(len(file.pages), 48, 16)
        assert len(file.pages) > 80
        assert reached <= len(file.windows) <= 2 * reached
        assert not act(engine, 0, "restore", "talk").error
        reply, num_cached = talk.ask(engine, other)
        stats = engine.stats()
    assert (reply, num_cached) == (expected, (len(talk.first) - 1) // 16 * 16), f"seed {SEED}"
    assert stats.num_window_pages < stats.num_pages


def test_a_file_without_room_for_its_windows_is_refused(talks: Callable[[str], Talk], tmp_path: Path) -> None:
    """While requests are promised all pages of the group and other saves read those set aside for them."""
    talk = talks("windows")
    with open_engine(talk, tmp_path) as engine:
        talk.ask(engine, talk.first)
        windows = engine.scheduler.resource(Windows)
        assert windows is not None
        left = windows.pages.num_left
        windows.pages.num_promised += left
        windows.pages.num_for_saves, set_aside = 0, windows.pages.num_for_saves
        assert "promised to requests" in act(engine, 0, "save", "talk").error
        assert not list(tmp_path.iterdir())
        windows.pages.num_promised -= left
        windows.pages.num_for_saves = set_aside
        assert not act(engine, 0, "save", "talk").error
        engine.scheduler.check_invariants()


def test_a_disk_beside_it_has_what_it_had(talks: Callable[[str], Talk], tmp_path: Path) -> None:
    """An export does not count as stored: the disk gets pages and states as without it."""
    talk = talks("recurrent states")
    disk = {"kv_disk": str(tmp_path / "disk"), "kv_disk_size": 64 << 20}
    save(talk, tmp_path / "files", **disk)
    reply, num_cached = talk.say(talk.second, tmp_path / "disk")
    assert reply == talk.reply
    assert num_cached >= 0.95 * (len(talk.second) - 10)


def test_damage_and_foreign_files_get_a_sentence(
    talks: Callable[[str], Talk], tmp_path: Path, rng: np.random.Generator
) -> None:
    talk = talks("full attention")
    save(talk, tmp_path)
    whole = (tmp_path / "talk").read_bytes()
    flipped = bytearray(whole)
    flipped[rng.integers(len(flipped) - 32)] ^= 1 << int(rng.integers(8))
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=SEED % 1000, max_position_embeddings=2048)
    with open_engine(talk, tmp_path) as engine:
        for name, data, says in [
            ("flipped", bytes(flipped), "is damaged, its digest is wrong"),
            ("short", whole[: int(rng.integers(len(whole)))], "is no session file, or its end is missing"),
            ("empty", b"", "is no session file, or its end is missing"),
        ]:
            (tmp_path / name).write_bytes(data)
            (tmp_path / name).chmod(0o600)
            seen = act(engine, 0, "restore", name)
            assert (says in seen.error, seen.num_tokens) == (True, 0), seen
        assert "cannot be read: No such file" in act(engine, 0, "restore", "none").error
        assert talk.ask(engine, talk.first)[1] == 0
    for folder, flags, says in [
        (other, {}, "another model"),
        (talk.folder, {"kv_cache_dtype": "int8"}, "KV of another shape"),
    ]:
        with LLM(folder, **ENGINE, **flags, slot_save_path=str(tmp_path)) as llm:
            assert says in act(llm._local.engine, 0, "restore", "talk").error


def test_a_file_that_goes_or_changes_later_is_a_miss(talks: Callable[[str], Talk], tmp_path: Path) -> None:
    talk = talks("full attention")
    save(talk, tmp_path)
    data = bytearray((tmp_path / "talk").read_bytes())
    with open_engine(talk, tmp_path) as engine:
        assert not act(engine, 0, "restore", "talk").error
        data[len(data) // 2] ^= 1
        (tmp_path / "talk").write_bytes(data)
        reply, num_cached = talk.ask(engine, talk.second)
        assert 0 < num_cached < 0.95 * len(talk.second)
    assert reply == talk.reply
    with open_engine(talk, tmp_path) as engine:
        assert "damaged" in act(engine, 0, "restore", "talk").error


def test_a_slot_whose_kv_is_gone_says_so(talks: Callable[[str], Talk], tmp_path: Path) -> None:
    with open_engine(talks("full attention"), tmp_path) as engine:
        talks("full attention").ask(engine, talks("full attention").first)
        engine.reset_prefix_cache()
        assert "no KV of this slot is cached any more" in act(engine, 0, "save", "talk").error
    assert not list(tmp_path.iterdir())


def test_conversations_keep_their_slots(rng: np.random.Generator) -> None:
    talks = Conversations(3)

    def end(tokens: np.ndarray, key: CacheKey = KEY) -> None:
        talks.add(SimpleNamespace(cache_key=key, token_ids=tokens, num_prompt_tokens=0))  # type: ignore[arg-type]

    def slots() -> list[int | None]:
        found = [talks.get(slot) for slot in range(3)]
        return [None if one is None else len(one[1]) for one in found]

    first, second, third = (rng.integers(0, 1000, 100, dtype=np.int32) for _ in range(3))
    end(first)
    end(second)
    assert slots() == [100, 100, None]
    end(np.concatenate([first, second]))
    assert slots() == [200, 100, None]
    end(np.concatenate([second[:95], third]))
    assert slots() == [200, 195, None], "a template may change the end of a turn"
    end(np.concatenate([first, second]), CacheKey("model", "of another client"))
    assert slots() == [200, 195, 200]
    end(third)
    assert slots() == [100, 195, 200], "the oldest makes room"
    assert talks.erase(1) == 195
    end(first)
    assert slots() == [100, 100, 200]
