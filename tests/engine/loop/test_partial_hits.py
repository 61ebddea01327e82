"""A request that begins inside a page, behind a copy of the equal beginning, answers as one that ran all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tokenmill import LLM, SamplingParams
from tokenmill.llm.outputs import RequestOutput
from tokenmill.model.kernels.native import load_kernels

needs_native = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
NATIVE = {"dtype": "bfloat16", "num_threads": 1}
PAGE_FIRST = {"kv_layout": "page-first", "async_scheduling": True}


def answers(outputs: list[RequestOutput]) -> tuple[list[list[int]], np.ndarray]:
    """Return tokens, and the log probability of each."""
    found = [(one.token_ids, one.logprobs or []) for output in outputs for one in output.outputs]
    chances = [[each[token].logprob for token, each in zip(*one, strict=True)] for one in found]
    return [list(tokens) for tokens, _ in found], np.array(chances)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param({}, {**NATIVE, "page_size": 64}, marks=needs_native),
        pytest.param({}, {**NATIVE, "page_size": 256, "kv_cache_dtype": "int8"}, marks=needs_native),
        pytest.param({}, {**NATIVE, "page_size": 128, "kv_cache_dtype": "int4"}, marks=needs_native),
        pytest.param({}, {**NATIVE, "page_size": 64, "kv_cache_dtype": "int8-int4"}, marks=needs_native),
        pytest.param({}, {**NATIVE, **PAGE_FIRST, "page_size": 64}, marks=needs_native),
        pytest.param({"family": "gemma3"}, {**NATIVE, "page_size": 32}, marks=needs_native),
        pytest.param({"family": "gemma3", "sliding_window": 150}, {**NATIVE, "page_size": 64}, marks=needs_native),
        ({"head_dim": 16}, {"dtype": "float32", "page_size": 32, "kernels": "torch"}),
    ],
    ids=["bf16", "int8", "int4", "int8-int4", "page-first", "windows", "wide-windows", "torch"],
)
def test_answers_are_those_of_requests_that_ran_all(
    shape: dict[str, Any], options: dict[str, Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    dtype = torch.bfloat16 if options["dtype"] == "bfloat16" else torch.float32
    folder = make_checkpoint(
        tmp_path,
        **{"family": "qwen3", "head_dim": 32, "max_position_embeddings": 2048, **shape},
        seed=int(rng.integers(1000)),
        dtype=dtype,
    )
    size = options["page_size"]
    first = rng.integers(0, 250, 2 * size + 50).tolist()
    # One leaves the first page inside, one the last full page; one is the first again, cut inside a page.
    cuts = [size - 7, 2 * size - 9, size + 21]
    prompts = [[*first[: cuts[0]], *rng.integers(0, 250, 40).tolist()]]
    prompts += [[*first[: cuts[1]], *rng.integers(0, 250, 40).tolist()], first[: cuts[2]]]
    found = []
    for cached in (False, True):
        with LLM(folder, enable_prefix_caching=cached, **options) as llm:
            llm.generate([first], PARAMS, use_tqdm=False)
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            found.append(answers(outputs))
            # What a random token has in common with the one that it replaces is a matter of luck.
            copied = [output.num_cached_tokens % size for output in outputs]
            assert llm.stats().prefix_partial_hits == sum(copied)
            assert (llm.stats().num_window_pages > 0) == ("family" in shape), "windows have pages of their own"
            if cached:
                assert all(output.num_cached_tokens >= cut for output, cut in zip(outputs, cuts[:2], strict=False))
                assert outputs[2].num_cached_tokens == cuts[2] - 1
    assert found[0][0] == found[1][0]
    if options["dtype"] == "bfloat16":
        assert (found[0][1] == found[1][1]).all(), "on native kernels the bits are the same"
    else:
        np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-3)  # torch's depend on the length of a step


@needs_native
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {"page_size": 16}),
        ("lfm2", {"page_size": 64}),
    ],
)
def test_small_pages_and_states_copy_none(
    kind: str, options: dict[str, Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path, kind, seed=3, dtype=torch.bfloat16)
    prompt = rng.integers(3, 90, 150).tolist()
    with LLM(folder, **NATIVE, **options) as llm:
        llm.generate([prompt], PARAMS, use_tqdm=False)
        (output,) = llm.generate([[*prompt[:125], 2, 2, 2]], PARAMS, use_tqdm=False)
        assert output.num_cached_tokens % options["page_size"] == 0
        assert llm.stats().prefix_partial_hits == 0
