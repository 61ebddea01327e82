"""Sources of one's own, by entry point or by module, and what nobody has."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.transfer.fake_source import FakeSource
from tests.eventually import eventually
from tokenmill import LLM, SamplingParams
from tokenmill.config.configs import EngineConfig
from tokenmill.config.kv_transfer import SOURCE_PLUGINS
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import TokenArray
from tokenmill.core.transfers import KVQuery
from tokenmill.engine.kv.window_pages import pages_of_window
from tokenmill.engine.transfer.checksum import find_checksum
from tokenmill.engine.transfer.extension import KVTransfer
from tokenmill.engine.transfer.orders import PageLoad, PageSave
from tokenmill.engine.transfer.protocol import Answer, SourceContext
from tokenmill.startup.assembly import kv_sources
from tokenmill.startup.assembly.setup import build_engine


def test_a_source_is_found_by_module_and_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "tests.engine.transfer.fake_source:FakeSource"
    assert kv_sources.find_source(where) is FakeSource
    entry = EntryPoint("fake", where, SOURCE_PLUGINS)

    def entry_points(group: str, name: str) -> list[EntryPoint]:
        return [entry] if (group, name) == (SOURCE_PLUGINS, "fake") else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert kv_sources.find_source("fake") is FakeSource


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nobody", "must be an entry point"),
        ("no.such.module:Source", "cannot be imported"),
        ("tests.engine.transfer.fake_source:Nothing", "cannot be imported"),
        ("tests.engine.transfer.fake_source:PATIENCE", "must be an entry point"),
    ],
)
def test_what_is_no_source_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=f"--kv-source.*{name}.*|--kv-source {why}") as error:
        kv_sources.find_source(name)
    assert why in str(error.value)


@pytest.mark.parametrize("flags", [{"kv_disk": "/tmp/x"}, {"kv_source": ("a",)}, {"kv_host_size": 1}])
def test_without_a_prefix_cache_there_is_no_kv_from_elsewhere(flags: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="needs the prefix cache"):
        EngineConfig(model="m", enable_prefix_caching=False, **flags).resolve()  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_holds_nothing_is_refused(size: int) -> None:
    with pytest.raises(InvalidConfig, match="kv-disk-size"):
        EngineConfig(model="m", kv_disk="/tmp/x", kv_disk_size=size).resolve()


BOXES: dict[str, dict[bytes, bytes]] = {}


class Box:
    """The smallest source: pages by their prefix, in a dictionary that its options name."""

    name, stores = "box", True

    def __init__(self, context: SourceContext) -> None:
        self.role, self._page_size = context.role, context.page_size
        self._page = bytearray(context.mover.page_bytes)
        self._pages = BOXES.setdefault(context.options["box"], {})

    def lookup(self, query: KVQuery, params: object) -> Answer:
        ends = range(self._page_size, len(query.tokens) + 1, self._page_size)
        keys = [query.tokens[:end].tobytes() for end in ends]
        return Answer(self._page_size * next((n for n, key in enumerate(keys) if key not in self._pages), len(keys)))

    def load(self, load: PageLoad) -> None:
        for number in range(len(load.order.page_ids)):
            end = (load.order.first_page + number + 1) * self._page_size
            load.fill(number, memoryview(self._pages[load.tokens[:end].tobytes()]))
        load.finish()

    def save(self, save: PageSave) -> None:
        for number in range(len(save.order.page_ids)):
            save.read(number, memoryview(self._page))
            end = (save.order.first_page + number + 1) * self._page_size
            self._pages[save.tokens[:end].tobytes()] = bytes(self._page)
        save.finish()

    def poll(self) -> tuple[int, ...]:
        return ()

    def forget(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass


class WindowBox(Box):
    """The same with pages of the window group, under a key that no page has."""

    serves_windows = True

    def __init__(self, context: SourceContext) -> None:
        super().__init__(context)
        assert context.windows is not None
        self._window, self._window_page = context.window, bytearray(context.windows.page_bytes)

    def lookup(self, query: KVQuery, params: object) -> Answer:
        size, found = self._page_size, super().lookup(query, params).num_tokens // self._page_size
        reaches = (found - n for n in range(found) if self._is_whole(query.tokens, found - n))
        return Answer(size * next(reaches, 0))

    def _is_whole(self, tokens: TokenArray, end: int) -> bool:
        first = end - pages_of_window(end, self._window, self._page_size)
        return all(self._key(tokens, number) in self._pages for number in range(first, end))

    def _key(self, tokens: TokenArray, number: int) -> bytes:
        return b"window" + tokens[: (number + 1) * self._page_size].tobytes()

    def load(self, load: PageLoad) -> None:
        assert load.order.windows, "the engine has a window group, and nothing of the prompt"
        _, checksum = find_checksum()
        end = load.order.first_page + len(load.order.page_ids)
        for place, number in enumerate(range(end - len(load.order.windows), end)):
            page = memoryview(self._pages[self._key(load.tokens, number)])
            assert load.fill_windows(place, page, [checksum(page)]) == 1
        super().load(load)

    def save(self, save: PageSave) -> None:
        for number, page in save.order.windows or ():
            assert save.read_window(page, memoryview(self._window_page))
            self._pages[self._key(save.tokens, number)] = bytes(self._window_page)
        super().save(save)


class StateBox(Box):
    """The same with recurrent states, under a key that no page has."""

    serves_states = True

    def __init__(self, context: SourceContext) -> None:
        super().__init__(context)
        assert context.states is not None
        self._state = bytearray(context.states.page_bytes)

    def lookup(self, query: KVQuery, params: object) -> Answer:
        found = super().lookup(query, params).num_tokens
        ends = range(found, 0, -self._page_size)
        return Answer(next((end for end in ends if b"state" + query.tokens[:end].tobytes() in self._pages), 0))

    def load(self, load: PageLoad) -> None:
        state = memoryview(self._pages[b"state" + load.tokens.tobytes()])
        _, checksum = find_checksum()
        assert load.fill_good_state(0, state, [checksum(state)]) == 1
        super().load(load)

    def save(self, save: PageSave) -> None:
        for num_pages, slot in save.order.states:
            assert save.read_state(slot, memoryview(self._state))
            self._pages[b"state" + save.tokens[: num_pages * self._page_size].tobytes()] = bytes(self._state)
        super().save(save)


def test_a_source_that_serves_states_has_those_of_a_model(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path, "lfm2")
    prompt = {"prompt_token_ids": rng.integers(0, 200, 330).tolist()}
    box = BOXES.setdefault(f"{tmp_path}", {})
    box.clear()

    def answer(box_class: str | None) -> tuple[list[int], int]:
        own = {"kv_connector": f"{__name__}:{box_class}", "kv_role": "kv_both"}
        config = json.dumps(own | {"kv_connector_extra_config": {"box": f"{tmp_path}"}}) if box_class else None
        options = {"dtype": "float32", "num_pages": 100, "page_size": 16, "kv_transfer_config": config}
        with LLM(folder, **options) as llm:  # type: ignore[arg-type]
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
            return list(output.outputs[0].token_ids), output.num_cached_tokens

    expected, _ = answer(None)
    assert answer("StateBox") == (expected, 0)
    assert any(key.startswith(b"state") for key in box)
    assert answer("StateBox") == (expected, 320)
    with pytest.raises(InvalidConfig, match="does not say serves_states"):
        answer("Box")


@pytest.mark.parametrize("by_flag", [False, True])
@pytest.mark.parametrize(("box_class", "maker"), [("Box", "plain_box"), ("WindowBox", "window_box")])
def test_a_source_that_serves_windows_lets_pages_behind_them_go(
    tmp_path: Path, rng: np.random.Generator, by_flag: bool, box_class: str, maker: str
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    folder = make_checkpoint(tmp_path, "qwen3", **window)
    prompt, flags = rng.integers(0, 200, 330).tolist(), {"dtype": "float32", "num_pages": 100, "page_size": 16}
    box = BOXES.setdefault(f"{tmp_path}", {})
    box.clear()
    name = f"{__name__}:{box_class}"
    options = {"box": f"{tmp_path}"}
    own = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": options}
    # Without a config a source has no options: this one finds its box by a name in its module.
    source: dict[str, object] = {"kv_transfer_config": json.dumps(own)}
    if by_flag:
        NAMED[box_class] = f"{tmp_path}"
        source = {"kv_source": (f"{__name__}:{maker}",)}

    def answer(**more: object) -> tuple[list[int], int, bool]:
        engine = build_engine(EngineConfig(model=str(folder), max_num_seqs=2, **flags, **more).resolve())  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=3, temperature=0)
        outputs = engine.engine.add(AddRequest(id="r", prompt_token_ids=prompt, params=params))
        while engine.engine.has_work:
            outputs += engine.engine.step()
        transfer = engine.engine.extension(KVTransfer)
        eventually(lambda: transfer is None or (engine.engine.step() is not None and not transfer.has_waiting))
        engine.engine.close()
        tokens = [token for output in outputs for token in output.token_ids]
        has_group = "pages for sliding windows" in engine.ready.kv_windows
        assert has_group or "a source of your own knows whole pages" in engine.ready.kv_windows
        return tokens, max(output.num_cached_tokens for output in outputs), has_group

    expected, *_ = answer()
    has_group = box_class == "WindowBox"
    assert answer(**source) == (expected, 0, has_group)
    assert answer(**source) == (expected, 320, has_group)
    num_windows = sum(key.startswith(b"window") for key in box)
    assert num_windows == (len(box) - 20 if has_group else 0)
    assert num_windows <= 3 * 3


NAMED: dict[str, str] = {}


def named_box(box_class: type[Box]) -> Callable[[SourceContext], Box]:
    """Return a maker of sources whose box has a name without options."""

    def make(context: SourceContext) -> Box:
        return box_class(msgspec.structs.replace(context, options={"box": NAMED[box_class.__name__]}))

    make.serves_windows = getattr(box_class, "serves_windows", False)  # type: ignore[attr-defined]
    return make


plain_box, window_box = named_box(Box), named_box(WindowBox)


@pytest.mark.parametrize("by_path", [False, True])
def test_a_connector_of_ones_own_has_a_role_and_options(
    tmp_path: Path, rng: np.random.Generator, by_path: bool
) -> None:
    folder = make_checkpoint(tmp_path)
    prompt = {"prompt_token_ids": rng.integers(0, 200, 90).tolist()}
    box = BOXES.setdefault(f"{tmp_path}", {})
    box.clear()

    def answer(role: str) -> tuple[list[int], int, int]:
        name = {"kv_connector": "Box", "kv_connector_module_path": __name__}
        config = (name if by_path else {"kv_connector": f"{__name__}:Box"}) | {
            "kv_role": role,
            "kv_connector_extra_config": {"box": f"{tmp_path}"},
        }
        options = {"dtype": "float32", "num_pages": 50, "page_size": 16, "kv_transfer_config": json.dumps(config)}
        with LLM(folder, **options) as llm:  # type: ignore[arg-type]
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
            return list(output.outputs[0].token_ids), output.num_cached_tokens, llm.stats().num_loaded_tokens

    tokens, *told = answer("kv_consumer")
    assert (told, box) == ([0, 0], {}), "a consumer stores nothing"
    assert answer("kv_producer") == (tokens, 0, 0)
    assert len(box) == 5
    assert answer("kv_producer") == (tokens, 0, 0), "a producer loads nothing"
    assert answer("kv_consumer") == (tokens, 80, 80)
    assert answer("kv_both") == (tokens, 80, 80)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_connector": "no.such.module:Source"}, "--kv-transfer-config no.such.module:Source: cannot be imported"),
        ({"kv_connector": "Nothing", "kv_connector_module_path": __name__}, "cannot be imported"),
        ({"kv_connector": "LMCacheConnectorV1"}, "an entry point of tokenmill.kv_sources, or module:name"),
        ({"kv_role": "kv_maybe"}, "kv_role"),
        ({"kv_port": 1}, "kv_port"),
    ],
)
def test_connectors_that_cannot_be_are_refused_in_a_sentence(
    tmp_path: Path, change: dict[str, object], why: str
) -> None:
    config = {"kv_connector": f"{__name__}:Box", "kv_role": "kv_both"} | change
    with pytest.raises(InvalidConfig, match=why):
        LLM(make_checkpoint(tmp_path), dtype="float32", num_pages=50, kv_transfer_config=json.dumps(config))
