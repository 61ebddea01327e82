"""Recall of what stands far back, exact in each format of KV: by weights that retrieve, not by training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import make_tokenizer
from tests.induction import START, InductionShape, haystack, make_induction_model
from tokenmill import LLM, SamplingParams
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

FORMATS = ["auto", "int8", "int8-int4", "int4"]
LENGTHS = [1024, 2048, 4096, 8192]
# Near the least at which each format recalls all at this length: 6; at 5 int4 copied 7% of a text, bfloat16 55%.
SHAPE = InductionShape(match_score=10.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that retrieves within 8,192 tokens."""
    folder = make_induction_model(tmp_path_factory.mktemp("induction"), SHAPE, seed=11)
    make_tokenizer(folder)
    return folder


def engine(folder: Path, **options: object) -> LLM:
    """Return an engine that runs prompts in chunks of 512 tokens."""
    return LLM(folder, dtype="bfloat16", num_threads=1, max_num_batched_tokens=512, **options)  # type: ignore[arg-type]


def greedy(num_tokens: int) -> SamplingParams:
    """Return the parameters of so many most likely tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_values_are_recalled_and_texts_copied(kv_cache_dtype: str, folder: Path, rng: np.random.Generator) -> None:
    """Eight values at random depths among tokens that repeat; 64 tokens from eight places of a text without repeats."""
    with engine(folder, kv_cache_dtype=kv_cache_dtype, max_model_len=SHAPE.max_position, num_pages=1200) as llm:
        for length in LENGTHS:
            depths = (np.arange(8) + rng.uniform(0.1, 0.9, 8)) / 8
            text, needles = haystack(length, depths.tolist(), rng, SHAPE.vocab_size)
            outputs = llm.generate([[*text, needle.key] for needle in needles], greedy(8), use_tqdm=False)
            for needle, output in zip(needles, outputs, strict=True):
                assert output.outputs[0].token_ids == needle.value, f"at {needle.depth:.0%} of {length} tokens"
            text = [START, *(1 + rng.permutation(SHAPE.vocab_size - 1)[: length - 1]).tolist()]
            places = rng.integers(1, length - 65, 8).tolist()
            outputs = llm.generate([[*text, text[place]] for place in places], greedy(64), use_tqdm=False)
            for place, output in zip(places, outputs, strict=True):
                assert output.outputs[0].token_ids == text[place + 1 : place + 65], f"from {place} of {length} tokens"


def test_needles_are_found_on_the_disk_after_a_start(folder: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """The short form of benchmarks/long_context.py: four depths, prompts by chunks, then from the disk."""
    text, needles = haystack(4096, [0.0, 1 / 3, 2 / 3, 1.0], rng, SHAPE.vocab_size)
    prompts = [[*text, needle.key] for needle in needles]
    for is_first in (True, False):
        with engine(folder, kv_disk=str(tmp_path), kv_disk_size=64 << 20, max_model_len=4160, num_pages=600) as llm:
            outputs = llm.generate(prompts, greedy(8), use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [needle.value for needle in needles]
            assert (llm.stats().num_loaded_tokens == 0) == is_first


def test_a_text_without_the_key_is_answered_by_something_else(folder: Path, rng: np.random.Generator) -> None:
    """The value comes out of the text: it is not in the weights."""
    text, (needle,) = haystack(512, [0.5], rng, SHAPE.vocab_size)
    without = [token if token < SHAPE.vocab_size - 9 else 1 for token in text]
    with engine(folder, max_model_len=600, num_pages=64) as llm:
        (output,) = llm.generate([[*without, needle.key]], greedy(8), use_tqdm=False)
        assert output.outputs[0].token_ids != needle.value
