from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.native import BEST, kernels
from tests.model.sampling.oracle import new_row, process
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.sampling.processors import add_entries, apply_bad_words, apply_penalties
from tokenmill.model.sampling.state import SamplingState


def penalize(
    all_params: list[SamplingParams],
    logits: torch.Tensor,
    prompts: np.ndarray,
    positions: np.ndarray,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Logits after the penalties of row i of the token table, i = 0, 1, ...: alike in both libraries of arrays."""
    state = SamplingState(len(all_params), logits.shape[1])
    for row, params in enumerate(all_params):
        state.set(new_row(row, params, num_prompt=int(prompts[row])))
    penalties = state.select(np.arange(len(all_params)), positions).penalties
    penalized = logits.clone()
    if penalties is not None:
        apply_penalties(penalized, penalties, tokens)
        on_host = logits.numpy().copy()
        apply_penalties(on_host, penalties, tokens.numpy())
        assert on_host.tobytes() == penalized.numpy().tobytes()
    return penalized


def test_penalties_are_those_of_the_definition_and_others_pay_nothing(rng):
    num_rows, vocab_size, max_len = 20, 30, 60
    all_params = [
        SamplingParams(temperature=0.0)
        if row % 4 == 0
        else SamplingParams(
            presence_penalty=float(rng.uniform(-2, 2)) if row % 2 else 0.0,
            frequency_penalty=float(rng.uniform(-2, 2)),
            repetition_penalty=float(rng.uniform(0.3, 3)) if row % 3 else 1.0,
        )
        for row in range(num_rows)
    ]
    prompts = rng.integers(1, max_len - 1, size=num_rows)
    positions = rng.integers(prompts, max_len)
    tokens = torch.from_numpy(rng.integers(vocab_size, size=(num_rows, max_len)))
    logits = torch.randn(num_rows, vocab_size) * 3
    # Past its position a row of the table holds what a former owner left, or nothing sensible.
    for row in range(num_rows):
        tokens[row, positions[row] :] = torch.from_numpy(
            rng.choice([-1, 0, 5, vocab_size, 2**40], size=max_len - positions[row])
        )
    penalized = penalize(all_params, logits, prompts, positions, tokens)
    for row, params in enumerate(all_params):
        ids = tokens[row].tolist()
        prompt, output = ids[: prompts[row]], ids[prompts[row] : positions[row]]
        expected = process(logits[row].numpy(), params, prompt, output)
        np.testing.assert_allclose(penalized[row].numpy(), expected, rtol=1e-5, atol=1e-5)
        if row % 4 == 0:
            assert torch.equal(penalized[row], logits[row])


def test_presence_and_frequency_look_at_the_output_only():
    tokens = torch.tensor([[1, 1, 2, 2, 2, 3, 9]])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    penalized = penalize([params], torch.zeros((1, 10)), np.array([3]), np.array([6]), tokens)
    assert penalized[0].tolist() == [0, 0, -1.0, -0.75, 0, 0, 0, 0, 0, 0]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    tokens = torch.tensor([[0, 1, 2, 3]])
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0]])
    penalized = penalize([SamplingParams(repetition_penalty=2.0)], logits, np.array([1]), np.array([3]), tokens)
    assert penalized[0].tolist() == [2.0, -8.0, 2.0, 4.0]


def test_bias_and_bad_words_are_the_same_bits_in_both_libraries_of_arrays(rng):
    num_rows, vocab_size, max_len = 12, 40, 30
    state = SamplingState(num_rows, vocab_size)
    tokens = rng.integers(4, size=(num_rows, max_len)).astype(np.int32)
    for row in range(num_rows):
        bias = {int(token_id): float(rng.normal()) for token_id in rng.integers(vocab_size, size=row % 4)}
        words = tuple(tuple(rng.integers(4, size=rng.integers(1, 4)).tolist()) for _ in range(row % 5))
        words += ((0,), (1,)) if row == 0 else ()
        state.set(new_row(row, SamplingParams(logit_bias=bias, bad_word_ids=words), num_prompt=2))
    logits = rng.normal(size=(num_rows, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = np.inf
    logits[0, :2] = np.inf, 0.0
    metadata = state.select(np.arange(num_rows), rng.integers(2, max_len, size=num_rows))
    assert metadata.bias is not None and metadata.bad_words is not None
    on_host, tensor = logits.copy(), torch.from_numpy(logits.copy())
    for array, table in ((on_host, tokens), (tensor, torch.from_numpy(tokens))):
        add_entries(array, metadata.bias)
        apply_bad_words(array, metadata.bad_words, table)
    np.testing.assert_array_equal(on_host, tensor.numpy())
    assert np.isneginf(on_host).any() and np.isnan(on_host).any()


@pytest.mark.skipif(not BEST, reason="the native kernels are not built here")
@pytest.mark.parametrize("max_len", [2, 60, 3000])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_penalties_have_the_bits_of_numpy(max_len, threads, rng):
    num_rows, vocab_size = 24, int(rng.choice([5, 331, 40_000]))
    tokens = rng.integers(vocab_size, size=(num_rows, max_len)).astype(np.int32)
    state = SamplingState(num_rows, vocab_size)
    prompts = rng.integers(1, max_len, size=num_rows)
    for row in range(num_rows):
        chosen = [float(value) for value in rng.choice([0.0, -0.5, 0.7, 2.0], 2)]
        penalty = SamplingParams(
            presence_penalty=chosen[0],
            frequency_penalty=chosen[1],
            repetition_penalty=float(rng.choice([0.5, 1.0, 1.3])),
        )
        state.set(new_row(row, penalty if row % 5 else SamplingParams(), num_prompt=int(prompts[row])))
    # Rows come again for later positions, as with drafts.
    rows = rng.integers(num_rows, size=40)
    penalties = state.select(rows, rng.integers(prompts[rows], max_len + 1)).penalties
    assert penalties is not None
    memory = rng.normal(size=(40, vocab_size + 3)).astype(np.float32)
    for value in (0.0, -0.0, np.inf, -np.inf, np.nan):
        memory[rng.random(memory.shape) < 0.05] = value
    want, got = memory[:, :vocab_size], memory.copy()[:, :vocab_size]
    apply_penalties(want, penalties, tokens)
    apply_penalties(got, penalties, tokens, kernels(BEST[0], threads))
    is_nan = np.isnan(want)
    assert np.array_equal(is_nan, np.isnan(got))
    assert np.array_equal(want.view(np.int32)[~is_nan], got.view(np.int32)[~is_nan])
