"""Every family through the whole engine: greedy tokens equal transformers', however the steps are cut.

Alone and in a mixed batch, whole and chunked, cold and from the prefix cache, with preemptions, and for both attention
backends. Checkpoints and prompts are drawn afresh each run.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from tests.checkpoints import FAMILIES, load_oracle, make_checkpoint
from tests.seeding import seed_for
from tokenmill import LLM, SamplingParams

SEED = seed_for(__name__)
NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
NUM_PROMPTS = 5
# Beyond it, rounding does not decide.
LEAST_MARGIN = 1e-3

# GQA ratios 1, 2, 4, 8; tied and untied embeddings; odd vocabulary sizes; scaled rotary positions and none; a
# short window; multipliers; windows in some layers; sinks; recurrent states.
SHAPES: dict[str, dict[str, object]] = {
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 277},
    "llama": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 24, "vocab_size": 301},
    "qwen3_moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "norm_topk_prob": True},
    "smollm3": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 291},
    "granite": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True},
    "gemma3": {"sliding_window": 24},
    "gemma4": {"sliding_window": 24, "final_logit_softcapping": 30.0},
    "gemma4_moe": {"sliding_window": 24, "final_logit_softcapping": 30.0},
    "phi3": {},
    "gpt_oss": {"sliding_window": 24},
    "lfm2": {},
    "lfm2_moe": {},
    "granite_hybrid": {},
    "olmo2": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "arcee": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_5": {"tie_word_embeddings": True},
    "qwen3_5_moe": {},
    "qwen3_next": {},
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, list]:
    """A checkpoint, prompts (two of which share a prefix), and the tokens that transformers chooses behind them."""
    family = request.param
    folder = make_checkpoint(tmp_path_factory.mktemp(family), family, seed=SEED, **SHAPES[family])
    generator, oracle = random.Random(SEED), load_oracle(folder)
    prompts: list[list[int]] = []
    expected: list[list[int]] = []
    with LLM(folder, dtype="float32", num_threads=1, enable_prefix_caching=False) as llm:
        while len(prompts) < NUM_PROMPTS:
            # The first is long, so that the last one finds a prefix of it in the cache.
            prompt = [generator.randrange(250) for _ in range(generator.randint(1, 40) if prompts else 60)]
            if len(prompts) == NUM_PROMPTS - 1:
                prompt = prompts[0][:40] + prompt[:3]
            output = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
            choices, margin = choices_along(oracle, prompt, output)
            if margin > LEAST_MARGIN:
                assert output == choices, f"a cold prompt alone, seed {SEED}"
                prompts.append(prompt)
                expected.append(choices)
    return folder, prompts, expected


@torch.no_grad()
def choices_along(
    oracle: transformers.PreTrainedModel, prompt: list[int], output: list[int]
) -> tuple[list[int], float]:
    """Return the oracle's choice at each place of an output, and its smallest lead over the second choice.

    An output that equals its choices is the oracle's own: one pass instead of one per token.
    """
    logits = oracle(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    return logits.argmax(-1).tolist(), float((best - second).min())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("whole prompts in one batch", {}),
        ("chunked prompts mixed with decodes", {"max_num_batched_tokens": 16, "max_num_seqs": 4, "page_size": 4}),
        (
            "so few pages that requests are preempted",
            {"num_pages": 14, "max_num_seqs": 3, "max_model_len": 96, "page_size": 8},
        ),
        ("the reference attention", {"attention_backend": "reference", "page_size": 1}),
        ("overlapping steps", {"async_scheduling": True, "max_num_batched_tokens": 32, "max_num_seqs": 4}),
    ],
)
def test_greedy_tokens_equal_transformers(case: tuple[Path, list, list], name: str, options: dict[str, object]) -> None:
    folder, prompts, expected = case
    with LLM(folder, dtype="float32", num_threads=1, **options) as llm:
        (alone,) = llm.generate(prompts[0], GREEDY, use_tqdm=False)
        together = llm.generate(prompts, GREEDY, use_tqdm=False)
        preemptions = llm.stats().num_preemptions
    assert alone.outputs[0].token_ids == expected[0], f"alone, seed {SEED}"
    assert [o.outputs[0].token_ids for o in together] == expected, f"in a batch, partly from the cache, seed {SEED}"
    if "num_pages" in options:
        assert preemptions > 0, "this case is meant to preempt"
    else:
        assert any(output.num_cached_tokens for output in together), "nothing came from the cache"


def test_a_cold_batch_equals_transformers_without_a_cache(case: tuple[Path, list, list]) -> None:
    folder, prompts, expected = case
    with LLM(folder, dtype="float32", num_threads=1, enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected, f"seed {SEED}"
    assert not any(output.num_cached_tokens for output in outputs)
