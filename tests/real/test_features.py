"""A real model under all that the engine does to save work: no token changes. And what it writes under a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.model.adapters.trained import LINEARS
from tests.real.conftest import DOWNLOADS
from tests.real.test_models import PROMPTS, greedy_tokens
from tests.real.test_vocabularies import tokenizer_of
from tokenmill import LLM, LoRARequest, SamplingParams, StructuredOutputs
from tokenmill.config.configs import EngineConfig
from tokenmill.demo import smollm2_head_path
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
    "a head": {"speculative_config": {"method": "eagle3", "model": str(smollm2_head_path())}},
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


def merged_tokens(path: Path, folder: Path, prompts: list[str]) -> list[list[int]]:
    """Write an adapter into folder/adapter; what peft's merging of it into transformers' model continues prompts by."""
    (folder / "model.gguf").symlink_to(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(folder / "adapter")
    merged, tokenizer = adapted.merge_and_unload(), tokenizer_of(path)
    return [greedy_tokens(merged, tokenizer.encode(prompt).ids, 64) for prompt in prompts]


@pytest.mark.timeout(1800)
def test_an_adapter_writes_what_the_merged_model_does(
    load: Callable[..., LLM], model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """Beside others in a step, and merged at the start. The oracle has gone before an engine needs memory."""
    want = merged_tokens(model_file("smollm2"), tmp_path, list(PROMPTS[1::2]))
    requests = [LoRARequest("some", 1, str(tmp_path / "adapter")) if place % 2 else None for place in range(8)]
    with load(dtype="float32", enable_lora=True) as llm:
        outputs = llm.generate(list(PROMPTS), GREEDY, lora_request=requests)
        plain = written(llm)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found[::2] == plain[::2]
    assert found[1::2] != plain[1::2], "it changes nothing"
    assert found[1::2] == want
    with load(dtype="float32", lora_merge=str(tmp_path / "adapter")) as llm:
        assert written(llm)[1::2] == want


@pytest.mark.parametrize("level", [1, 2])
def test_what_has_slept_writes_the_same(level: int, load: Callable[..., LLM]) -> None:
    with load() as llm:
        want = written(llm)
        llm.sleep(level)
        llm.wake_up()
        assert written(llm) == want


def test_formats_lose_little(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    """Bounds of two to four times what was measured: KL 0.0044 as stored."""
    base = EngineConfig(model=str(model_file("smollm2")), download_dir=str(tmp_path), max_num_seqs=1)
    text = BUNDLED.read_text(encoding="utf-8")
    _, stored, narrow = measure(base, text, ["stored"], ["auto", "int8"], context=256, most_chunks=2)["rows"]
    assert stored["kl_mean"] < 0.012
    assert narrow["kl_mean"] < 0.016
    assert 0.96 < stored["ppl_ratio"] < 1.04
    assert stored["same_top"] > 0.88
