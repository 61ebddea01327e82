"""Sources of one's own, by entry point or by module, and what nobody has."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.transfer.fake_source import FakeSource
from tokenmill import LLM, SamplingParams
from tokenmill.config.configs import EngineConfig
from tokenmill.config.kv_transfer import SOURCE_PLUGINS
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.transfers import KVQuery
from tokenmill.engine.transfer.orders import PageLoad, PageSave
from tokenmill.engine.transfer.protocol import Answer, SourceContext
from tokenmill.startup.assembly import kv_sources


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
