"""Real models as they are served: greedy tokens in float32 against transformers, and the short form of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.real.conftest import DOWNLOADS
from tokenmill import LLM, SamplingParams

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Q: What is 17 + 25?\nA:",
    "Der Regen hatte am Morgen aufgehört, und",
    "1, 2, 3, 4, 5,",
    '{"name": "Ada", "born":',
    "The three most important ideas in biology are",
)
NUM_TOKENS = 64


def load(path: Path, **options: object) -> LLM:
    return LLM(str(path), max_model_len=512, max_num_seqs=4, kv_cache_memory_bytes=64 << 20, **options)


def oracle_tokens(path: Path, prompts: list[list[int]], folder: Path) -> list[list[int]]:
    """Greedy continuations by transformers, which reads the GGUF file by itself."""
    (folder / "model.gguf").symlink_to(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    return [greedy_tokens(model, ids, NUM_TOKENS) for ids in prompts]


def greedy_tokens(model: transformers.PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The continuation of a prompt by so many tokens."""
    whole = torch.tensor([ids])
    out = model.generate(
        whole, attention_mask=torch.ones_like(whole), do_sample=False, max_new_tokens=count, eos_token_id=None
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_greedy_tokens_in_float32_are_those_of_transformers(
    name: str, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    if not DOWNLOADS.is_dir():
        pytest.skip("minutes of work: make real")
    path = model_file(name)
    llm = load(path, dtype="float32", download_dir=str(tmp_path / "cache"))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params)
    prompts = [list(output.prompt_token_ids) for output in outputs]
    (tmp_path / "oracle").mkdir()
    want = oracle_tokens(path, prompts, tmp_path / "oracle")
    assert [list(output.outputs[0].token_ids) for output in outputs] == want
    shutil.rmtree(tmp_path / "cache")


def test_smollm2_answers_from_its_file_alone(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    """The short form: vocabulary, template, ends and weights of a published file, as it is served."""
    path = model_file("smollm2")
    llm = load(path, download_dir=str(tmp_path / "cache"))
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    (output,) = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=24))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    (tmp_path / "model.gguf").symlink_to(path)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    want = oracle.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert list(output.prompt_token_ids) == want
