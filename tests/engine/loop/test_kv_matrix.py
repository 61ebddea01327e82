"""Nothing is computed twice: what an engine can serve by what may happen to it.

Each cell is a conversation that goes on in the next engine: at least 95% of it is found, and the bits of the answer are
those of an engine to which nothing happened. docs/kv-transfer.md has the table, with the cells that are blank and why.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.loop.kv_talks import (
    DISK_BYTES,
    ENGINE,
    PARAMS,
    SEED,
    SERVED,
    STATES,
    WINDOWED,
    Talk,
    make_talk,
)
from tests.eventually import eventually
from tests.model.kernels.native import ISAS
from tests.serving.server.running_server import free_port
from tests.serving.server.split_servers import ASKED, transfer_config
from tests.tiers import some
from tokenmill import LLM
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.version import VERSION, versions
from tokenmill.engine.kv.window_pages import most_window_pages
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.scheduler.resources.windows import Windows
from tokenmill.engine.transfer.extension import KVTransfer
from tokenmill.engine.transfer.orders import PageLoad
from tokenmill.engine.transfer.pins import Pin
from tokenmill.engine.transfer.remote.source import RemoteSource
from tokenmill.engine.transfer.state import TransferState
from tokenmill.engine.transfer.tier import Tier
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.startup.sizing.state_size import BYTES_OF

FOUND = 0.95
WAYS = ("unix", "tcp")
ONE_RANK = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
Next = dict[str, Any]  # how the next engine is opened and asked


@contextmanager
def restart(talk: Talk, disk: Path) -> Iterator[Next]:
    """The engine ends, another one begins."""
    talk.say(talk.first, disk)
    yield {"disk": disk}


@contextmanager
def kill(talk: Talk, disk: Path) -> Iterator[Next]:
    """The files as they are while the engine still runs, as kill -9 leaves them."""
    with talk.open(disk) as engine:
        talk.ask(engine, talk.first)
        talk.stored(engine)
        left = Path(shutil.copytree(disk, disk.with_name("left")))
    yield {"disk": left}


@contextmanager
def beside(talk: Talk, disk: Path) -> Iterator[Next]:
    """The engine runs on while another one begins."""
    with talk.open(disk) as engine:
        talk.ask(engine, talk.first)
        talk.stored(engine)
        yield {"disk": disk}


@contextmanager
def swap(talk: Talk, disk: Path) -> Iterator[Next]:
    """Another model has its turn, with the same tokens, over the same folder."""
    talk.say(talk.first, disk)
    other = make_checkpoint(disk.with_name("other"), "llama", seed=SEED % 1000, max_position_embeddings=2048)
    words = [token for token in talk.first if token < 250]
    with LLM(other, **ENGINE, kv_disk=str(disk), kv_disk_size=DISK_BYTES) as llm:
        (output,) = llm.generate([words], PARAMS, use_tqdm=False)
        assert output.num_cached_tokens == 0, "KV of another model"
    yield {"disk": disk}


@contextmanager
def upgrade(talk: Talk, disk: Path) -> Iterator[Next]:
    """Another release stores, wherever its name is read: then this one comes."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("tokenmill.") and getattr(module, "VERSION", None) == VERSION:
                stack.enter_context(patch.object(module, "VERSION", "0.0.9"))
        assert versions()["tokenmill"] == "0.0.9"
        talk.say(talk.first, disk)
    yield {"disk": disk}


@contextmanager
def split(talk: Talk, disk: Path) -> Iterator[Next]:
    """One engine computes the prompt, another one fetches its pages and decodes; no disk."""
    disk.mkdir()
    with talk.open(kv_transfer_config=transfer_config("kv_producer", disk, "unix", 0)) as engine:
        # Of several engines of a server, each has a socket with its number.
        own = f"0.sock.{talk.replica}" if talk.replica else "0.sock"
        (*_, last) = talk.outputs(engine, talk.second, ASKED)
        consumer = transfer_config("kv_consumer", disk, "unix", 0)
        yield {"kv_transfer_config": consumer.replace("0.sock", own), "params": last.kv_transfer_params}


EVENTS = {"restart": restart, "kill": kill, "swap": swap, "beside": beside, "upgrade": upgrade, "split": split}
CELLS = [(served, event) for served in SERVED for event in EVENTS]


def pins(engine: Engine) -> list[Pin]:
    """Return what an engine holds for those who come to fetch it."""
    state = engine.scheduler.resource(TransferState)
    assert state is not None
    return list(state.pins.values())


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Talk]:
    made: dict[str, Talk] = {}

    def find(name: str) -> Talk:
        if name not in made:
            made[name] = make_talk(name, tmp_path_factory.mktemp)
        return made[name]

    return find


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
@pytest.mark.parametrize(("served", "event"), some(CELLS, 4))
def test_a_conversation_goes_on(talks: Callable[[str], Talk], served: str, event: str, tmp_path: Path) -> None:
    talk = talks(served)
    with EVENTS[event](talk, tmp_path / "kv") as then:
        reply, num_cached = talk.say(talk.second, **then)
    assert reply == talk.reply, f"seed {SEED}"
    assert num_cached >= FOUND * (len(talk.second) - 10), "the turns that were there before"


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
@pytest.mark.parametrize("served", some(WINDOWED, 2))
def test_windows_hold_and_store_few_pages_beside_a_disk(
    talks: Callable[[str], Talk], served: str, tmp_path: Path
) -> None:
    """A window of 48 tokens reaches three pages; a text of 1,300 fills 81 and more."""
    talk, seen = talks(served), []
    with talk.open(tmp_path / "kv") as engine:
        assert engine.stats().num_window_pages < engine.stats().num_pages
        outputs = engine.add(AddRequest(id="one", prompt_token_ids=talk.first, params=PARAMS))
        while not outputs or outputs[-1].finish_reason is None:
            if outputs:  # the prompt is committed
                stats = engine.stats()
                seen.append((stats.num_window_pages_pinned, stats.num_pages_pinned))
            outputs += engine.step()
        talk.stored(engine)
        transfer = engine.extension(KVTransfer)
        assert transfer is not None
        (disk,) = transfer.sources
        assert isinstance(disk, Tier)
        eventually(lambda: engine.step() is not None and not transfer.has_waiting)
        pages, windows = disk.tables.all
    # Its own, the page that is filled, the next one, and those of one save.
    most = 2 * most_window_pages(48, 16)
    assert seen
    assert all(windowed <= most and full > 80 for windowed, full in seen)
    assert len(pages) > 80
    assert 0 < len(windows) <= 3 * 3


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
@pytest.mark.parametrize(("served", "transport"), some([(name, way) for name in WINDOWED for way in WAYS], 2))
def test_windows_go_to_another_engine(
    talks: Callable[[str], Talk], served: str, transport: str, tmp_path: Path
) -> None:
    """Both engines hold few pages of windows; those that a decode begins with are sent."""
    talk, config = talks(served), partial(transfer_config, folder=tmp_path, transport=transport, port=free_port())
    with (
        talk.open(kv_transfer_config=config("kv_producer")) as producer,
        talk.open(kv_transfer_config=config("kv_consumer")) as consumer,
    ):
        (*_, last) = talk.outputs(producer, talk.second, ASKED)
        kept = producer.stats().num_window_pages_pinned
        assert 0 < kept <= 2 * most_window_pages(48, 16)
        found = talk.ask(consumer, talk.second, last.kv_transfer_params)
        assert found == (talk.reply, (len(talk.second) - 1) // 16 * 16), f"seed {SEED}"
        eventually(lambda: producer.step() is not None and producer.stats().num_window_pages_pinned == 0)
        for engine in (producer, consumer):
            assert engine.stats().num_window_pages < engine.stats().num_pages
            engine.scheduler.check_invariants()  # type: ignore[attr-defined]


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
def test_a_producer_without_room_for_windows_offers_nothing(talks: Callable[[str], Talk], tmp_path: Path) -> None:
    """All pages of the group are promised to others: whoever decodes computes the prompt."""
    talk = talks("windows")
    with talk.open(kv_transfer_config=transfer_config("kv_producer", tmp_path, "unix", 0)) as engine:
        windows = engine.scheduler.resource(Windows)
        assert windows is not None
        windows.pages.num_for_saves = 0
        left = windows.pages.num_left - windows.pages.num_wanted(100)
        windows.pages.num_promised += left
        (*_, last) = talk.outputs(engine, talk.second, ASKED)
        windows.pages.num_promised -= left
        assert last.kv_transfer_params is None
        eventually(lambda: engine.step() is not None and engine.stats().num_pages_pinned == 0)


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
@pytest.mark.parametrize(("served", "transport"), some([(name, way) for name in STATES for way in WAYS], 2))
def test_states_go_to_another_engine(talks: Callable[[str], Talk], served: str, transport: str, tmp_path: Path) -> None:
    """That at the end of the prompt's last full page is kept, beside the newest, and sent; a decode begins there."""
    talk, config = talks(served), partial(transfer_config, folder=tmp_path, transport=transport, port=free_port())
    with (
        talk.open(kv_transfer_config=config("kv_producer")) as producer,
        talk.open(kv_transfer_config=config("kv_consumer")) as consumer,
    ):
        whole = (len(talk.second) - 1) // 16 * 16
        (*_, last) = talk.outputs(producer, talk.second, ASKED)
        ((first, *others),) = [pin.states for pin in pins(producer)]
        assert first == whole // 16
        assert len(others) <= 1
        assert talk.ask(consumer, talk.second, last.kv_transfer_params) == (talk.reply, whole), f"seed {SEED}"
        eventually(lambda: producer.step() is not None and not pins(producer))
        for engine in (producer, consumer):
            engine.scheduler.check_invariants()  # type: ignore[attr-defined]


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
@pytest.mark.parametrize("served", some(list(STATES), 1))
@pytest.mark.parametrize("fault", ["damaged", "refused", "killed"])
def test_a_state_that_does_not_come_is_computed(
    talks: Callable[[str], Talk], served: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes change on the way, the producer has given it up, or is gone: the bits are those of one engine."""
    talk, config = talks(served), partial(transfer_config, folder=tmp_path, transport="unix", port=0)
    with (
        talk.open(kv_transfer_config=config("kv_consumer")) as consumer,
        talk.open(kv_transfer_config=config("kv_producer")) as producer,
    ):
        (*_, last) = talk.outputs(producer, talk.second, ASKED)
        fill, met = PageLoad.fill_good_state, []

        def fill_damaged(load: PageLoad, first: int, data: memoryview, checksums: list[int]) -> int:
            met.append(fill(load, first, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:])), checksums))
            return met[-1]

        if fault == "damaged":
            monkeypatch.setattr(PageLoad, "fill_good_state", fill_damaged)
        elif fault == "refused":
            transfer = producer.extension(KVTransfer)
            assert transfer is not None
            (source,) = transfer.sources
            assert isinstance(source, RemoteSource)
            (lease,) = source.leases._leases.values()
            monkeypatch.setattr(lease, "_beside", {})
        else:
            producer.close()
        assert talk.ask(consumer, talk.second, last.kv_transfer_params) == (talk.reply, 0), f"seed {SEED}"
        assert met == ([0] if fault == "damaged" else [])
        consumer.scheduler.check_invariants()  # type: ignore[attr-defined]


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
def test_a_producer_without_room_for_a_state_offers_nothing(talks: Callable[[str], Talk], tmp_path: Path) -> None:
    """The only slot is that of the request: whoever decodes computes the prompt."""
    talk = talks("recurrent states")
    size = read_architecture(talk.folder).state_bytes(BYTES_OF["bfloat16"])
    config = transfer_config("kv_producer", tmp_path, "unix", 0)
    with talk.open(kv_transfer_config=config, max_num_seqs=1, state_memory=size) as engine:
        (*_, last) = talk.outputs(engine, talk.second, ASKED)
        assert last.kv_transfer_params is None
        eventually(lambda: engine.step() is not None and not pins(engine))


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
def test_a_prompt_is_found_up_to_where_its_window_is(talks: Callable[[str], Talk], tmp_path: Path) -> None:
    """At its end, where it begins again; another one that leaves it in the middle is computed."""
    talk = talks("Gemma 3")
    talk.say(talk.second, tmp_path)
    told, num_cached = talk.say(talk.second, tmp_path)
    assert (told, num_cached) == (talk.reply, (len(talk.second) - 1) // 16 * 16)
    other = [*talk.second[:800], *reversed(talk.second[800:])]
    expected, _ = talk.say(other)
    assert talk.say(other, tmp_path) == (expected, 0), "nothing is there of a window in the middle"
    assert talk.say(other, tmp_path) == (expected, (len(other) - 1) // 16 * 16)
    third = [*talk.second[:800], *talk.second[100:300]]
    expected, _ = talk.say(third)
    assert talk.say(third, tmp_path)[0] == expected


def test_other_numbers_find_nothing(
    talks: Callable[[str], Talk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that rounds in another way, so has another `NUMERICS`, takes nothing of it, and answers right."""
    talk = talks("int4 KV")
    talk.say(talk.first, tmp_path)
    assert talk.say(talk.second, tmp_path)[1] > 0
    monkeypatch.setattr("tokenmill.model.weights.fingerprint.NUMERICS", -1)
    assert talk.say(talk.second, tmp_path) == (talk.reply, 0)


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
@pytest.mark.parametrize(("ours", "theirs"), some([("ranks", "full attention"), ("full attention", "stages")], 1))
def test_ranks_and_stages_take_pages_of_as_many(
    talks: Callable[[str], Talk], ours: str, theirs: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others cut a page in another way: refused by name, and computed."""
    talk, config = talks(ours), partial(transfer_config, folder=tmp_path, transport="unix", port=0)
    _, _, flags = SERVED[theirs]
    with (
        talk.open(kv_transfer_config=config("kv_producer")) as producer,
        talk.open(kv_transfer_config=config("kv_consumer"), **{**ONE_RANK, **flags}) as consumer,
    ):
        (*_, last) = talk.outputs(producer, talk.second, ASKED)
        assert talk.ask(consumer, talk.second, last.kv_transfer_params) == (talk.reply, 0), f"seed {SEED}"
    assert "cut for 1 " in caplog.text
    assert "cut for 2 " in caplog.text


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
@pytest.mark.parametrize("served", some(["ranks", "stages"], 1))
def test_a_source_of_ones_own_has_the_pages_of_all_ranks(
    talks: Callable[[str], Talk], served: str, tmp_path: Path
) -> None:
    own = {"kv_connector": "tests.startup.assembly.test_kv_plugins:Box", "kv_role": "kv_both"}
    config = json.dumps(own | {"kv_connector_extra_config": {"box": f"{tmp_path}"}})
    talk = talks(served)
    assert talk.say(talk.second, kv_transfer_config=config) == (talk.reply, 0), f"seed {SEED}"
    found = talk.say(talk.second, kv_transfer_config=config)
    assert found == (talk.reply, (len(talk.second) - 1) // 16 * 16), f"seed {SEED}"


@pytest.mark.parametrize("flag", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_and_stages_refuse_the_tier_of_gpus(flag: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=1)
    with pytest.raises(InvalidConfig, match="needs an engine of one rank"):
        LLM(folder, **ENGINE, **{flag: 2, "kv_host_size": 1 << 20})
