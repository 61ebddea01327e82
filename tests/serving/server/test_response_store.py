"""Stored responses: bounds in memory and on the disk, and what outlives a server."""

import asyncio
import os

import openai
import pytest

from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.serving.server.response_files import ResponseFiles, StoredResponse
from tokenmill.serving.server.response_store import ResponseMemory, ResponseStore

KEYS = ("key-one", "key-two")


def stored(name, size=10):
    return StoredResponse({"id": name}, [], size)


def complete(number, text="", status="completed"):
    return StoredResponse({"id": f"resp_{number:x}", "status": status, "text": text}, [], len(text))


def test_the_store_is_bounded_in_number_and_in_bytes():
    store = ResponseMemory(max_responses=3, max_bytes=10_000)
    for name in "abc":
        store.put("", stored(name))
    assert store.get("", "a") is not None
    store.put("", stored("d"))
    assert store.get("", "b") is None, "the one that was used longest ago"
    assert store.get("", "a") is not None
    store.put("", stored("e", 9_995))
    assert [name for name in "acde" if store.get("", name)] == ["e"]
    store.put("", stored("f", 20_000))
    assert store.get("", "f") is None
    assert store.get("", "e") is not None
    assert store.drop("", "e")
    assert not store.drop("", "e")


def test_whatever_others_store_each_owner_keeps_its_share(rng):
    """Fresh owners, sizes and orders: who holds no more than an equal share loses nothing, and bounds always hold."""
    for _ in range(30):
        num_owners, most, most_bytes = int(rng.integers(1, 6)), int(rng.integers(6, 40)), int(rng.integers(500, 5000))
        store = ResponseMemory(most, most_bytes)
        modest = {f"own-{i}": 100 for i in range(min(most, most_bytes // 100) // num_owners)}
        for name, size in modest.items():
            store.put("modest", stored(name, size))
        for number in range(200):
            owner = f"greedy-{rng.integers(num_owners - 1)}" if num_owners > 1 else "modest"
            if owner == "modest":
                break
            store.put(owner, stored(f"{owner}-{number}", int(rng.integers(1, most_bytes // 4))))
            assert store.get(owner, "own-0") is None, "nobody's but its owner's"
            assert not store.drop(owner, "own-0")
        assert all(store.get("modest", name) for name in modest)
        found = [one for shelf in store._shelves.values() for one in shelf.stored.values()]
        assert len(found) <= most
        assert sum(one.num_bytes for one in found) <= most_bytes


def test_files_hold_their_bound_and_each_owner_its_share(tmp_path, rng):
    """Fresh owners and sizes: the modest one keeps all, the bytes of all files stay below the bound, none is half."""
    most = 40_000
    files = ResponseFiles(tmp_path, most)
    for number in range(10):
        files.put("aa", complete(number, "modest"))
        os.utime(tmp_path / "aa" / f"resp_{number:x}.json", (0, 0))
    for number in range(300):
        files.put("bb" if rng.random() < 0.7 else "cc", complete(number, "x" * int(rng.integers(1, most // 5))))
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= most
    assert all(files.get("aa", f"resp_{number:x}") == complete(number, "modest") for number in range(10))
    files.put("aa", complete(11, "x" * (most // 4 + 1)))
    assert files.get("aa", "resp_b") is None, "too large for any"
    assert {path.suffix for path in tmp_path.glob("*/*")} == {".json"}


def test_who_was_asked_for_last_stays_longest(tmp_path):
    files = ResponseFiles(tmp_path, 10_000)
    for number in range(4):
        files.put("", complete(number, "x" * 2000))
        os.utime(tmp_path / "open" / f"resp_{number:x}.json", (number, number))
    assert files.get("", "resp_0") is not None
    files.put("", complete(4, "x" * 2000))
    assert [number for number in range(5) if files.get("", f"resp_{number:x}")] == [0, 2, 3, 4]


@pytest.mark.parametrize("name", ["../resp_1", "resp_1/../resp_1", "resp_", "resp_G", "", ".", "resp_1.json"])
def test_an_id_is_no_path(tmp_path, name):
    files = ResponseFiles(tmp_path / "kept")
    (tmp_path / "resp_1.json").write_text('{"response": {}, "messages": [], "num_bytes": 1}')
    assert files.get("", name) is None
    assert not files.drop("", name)
    files.put("", StoredResponse({"id": name, "status": "completed"}, [], 1))
    assert [*(tmp_path / "kept").rglob("*")] == []
    assert (tmp_path / "resp_1.json").exists()


def test_a_file_that_holds_no_response_is_passed_over(tmp_path):
    files = ResponseFiles(tmp_path)
    files.put("aa", complete(1))
    for content in (b"", b"{", b"[]", b'{"response": 1, "messages": [], "num_bytes": 1}'):
        (tmp_path / "aa" / "resp_1.json").write_bytes(content)
        assert files.get("aa", "resp_1") is None


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"--responses-dir: .*file cannot be used"):
        ResponseFiles(tmp_path / "file")


def test_what_is_not_complete_is_in_memory_and_what_the_disk_refuses_too(tmp_path):
    async def trial():
        store = ResponseStore(ResponseFiles(tmp_path))
        store.put("aa", complete(1, status="queued"))
        assert [*tmp_path.rglob("*.json")] == []
        store.put("aa", complete(1, "whole"))
        assert await store.get("aa", "resp_1") == complete(1, "whole")
        (tmp_path / "bb").write_text("in the way of the owner's folder")
        store.put("bb", complete(2, "kept"))
        assert await store.get("bb", "resp_2") == complete(2, "kept")
        await store.close()
        again = ResponseStore(ResponseFiles(tmp_path))
        assert await again.get("aa", "resp_1") == complete(1, "whole")
        assert await again.get("bb", "resp_1") is None
        assert await again.drop("aa", "resp_1")
        assert not await again.drop("aa", "resp_1")
        await again.close()

    asyncio.run(trial())


def client_of(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key).responses


def test_responses_outlive_their_server(stub_model, tmp_path):
    engine, kept = EngineConfig(model=str(stub_model)), str(tmp_path / "kept")
    with start_server(engine, responses_dir=kept, api_key=KEYS) as server:
        mine = client_of(server, KEYS[0])
        first = mine.create(model="echo", input="one two", max_output_tokens=8)
        gone = mine.create(model="echo", input="gone", max_output_tokens=8)
        mine.delete(gone.id)
        server.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        assert kept not in server.http.get(f"{server.url}/server_info").text
    with start_server(engine, responses_dir=kept, api_key=KEYS) as server:
        mine, others = (client_of(server, key) for key in KEYS)
        assert mine.retrieve(first.id).output_text == first.output_text
        more = mine.create(model="echo", input="three", previous_response_id=first.id, max_output_tokens=8)
        assert more.usage.input_tokens > first.usage.input_tokens + len("three")
        for ask in (mine.retrieve, mine.delete):
            with pytest.raises(openai.NotFoundError):
                ask(gone.id)
        with pytest.raises(openai.NotFoundError):
            others.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            others.create(model="echo", input="x", previous_response_id=first.id)
        mine.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            mine.retrieve(first.id)
