"""A real model under all that the engine does to save work: no token changes. And what it writes under a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import DOWNLOADS
from tests.real.test_models import PROMPTS
from tokenmill import LLM, SamplingParams, StructuredOutputs
from tokenmill.config.configs import EngineConfig
from tokenmill.lab.bench.quality import BUNDLED, measure

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99999999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
# What changes how steps are cut, and how far drafts, caches and preemptions go.
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16},
    "one at a time": {"max_num_seqs": 1},
    "room for two": {"num_pages": 12, "kv_cache_memory_bytes": None, "admission": "optimistic"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "no prefixes": {"enable_prefix_caching": False},
    "pages of 1": {"page_size": 1},
    "page first": {"kv_layout": "page-first"},
}


@pytest.fixture(autouse=True)
def has_time() -> None:
    if not DOWNLOADS.is_dir():
        pytest.skip("minutes of work: make real")


@pytest.fixture
def load(model_file: Callable[[str], Path], tmp_path: Path) -> Callable[..., LLM]:
    path = str(model_file("smollm2"))

    def open_with(**options: Any) -> LLM:
        fields = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, **options}
        fields = {name: value for name, value in fields.items() if value is not None}
        return LLM(path, download_dir=str(tmp_path / "cache"), weight_cache_dir=str(tmp_path / "weights"), **fields)

    return open_with


def written(llm: LLM, prompts: list[str] | None = None) -> list[list[int]]:
    outputs = llm.generate(prompts or list(PROMPTS), GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_are_the_same_however_steps_are_cut(load: Callable[..., LLM]) -> None:
    with load() as llm:
        want = written(llm)
        assert written(llm) == want, "from the cache"
        assert [written(llm, [prompt])[0] for prompt in PROMPTS] == want, "alone"
    for name, options in OPTIONS.items():
        with load(**options) as llm:
            assert written(llm) == want, name
            assert (llm.stats().num_preemptions > 0) == (name == "room for two")


def test_schemas_are_kept(load: Callable[..., LLM]) -> None:
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=100, structured_outputs=StructuredOutputs(json=SCHEMA), n=8
    )
    with load() as llm:
        (output,) = llm.chat([[{"role": "user", "content": "Name a city and how many people live there."}]], params)
    for sample in output.outputs:
        found = json.loads(sample.text)
        assert found.keys() == {"city", "people"}
        assert isinstance(found["people"], int)


def test_formats_lose_little(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    """Bounds of two to four times what was measured: KL 0.0044 as stored."""
    base = EngineConfig(model=str(model_file("smollm2")), download_dir=str(tmp_path), max_num_seqs=1)
    text = BUNDLED.read_text(encoding="utf-8")
    _, stored, narrow = measure(base, text, ["stored"], ["auto", "int8"], context=256, most_chunks=2)["rows"]
    assert stored["kl_mean"] < 0.012
    assert narrow["kl_mean"] < 0.016
    assert 0.96 < stored["ppl_ratio"] < 1.04
    assert stored["same_top"] > 0.88
