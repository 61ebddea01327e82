from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from tests.model.sampling.oracle import distribution, metadata_of, new_row, process
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.sampling import reference
from tokenmill.model.sampling.drawn import Drawn, sample_drawn
from tokenmill.model.sampling.logprobs import to_messages
from tokenmill.model.sampling.sampler import Outputs, Sampler
from tokenmill.model.sampling.state import SamplingState

MAX_LEN = 40


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Any mix of features, each on about half of the time or less."""

    def sometimes(chance: float, value: object, otherwise: object) -> object:
        return value if rng.random() < chance else otherwise

    biased = rng.choice(vocab_size, size=min(3, vocab_size), replace=False).tolist()
    return SamplingParams(
        temperature=sometimes(0.7, float(rng.uniform(0.1, 2.0)), 0.0),
        top_k=sometimes(0.4, int(rng.integers(1, vocab_size + 5)), 0),
        top_p=sometimes(0.4, float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=sometimes(0.3, float(rng.uniform(0.0, 0.3)), 0.0),
        presence_penalty=sometimes(0.3, float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=sometimes(0.3, float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=sometimes(0.3, float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=sometimes(0.3, {token: float(rng.uniform(-200, 200)) for token in biased}, {}),
        min_tokens=sometimes(0.3, int(rng.integers(1, 20)), 0),
        logprobs=sometimes(0.4, int(rng.integers(0, 6)), None),
        allowed_token_ids=sometimes(0.2, tuple(rng.integers(vocab_size, size=5).tolist()), None),
    )


def bad_words(rng: np.random.Generator, params: SamplingParams, output: list[int], logits: np.ndarray):
    """Words of which the output ends with the head, or almost; their last tokens are likely ones."""
    if rng.random() < 0.6:
        return params
    words = []
    for last in np.argsort(-logits)[:3].tolist():
        head = output[len(output) - int(rng.integers(0, min(4, len(output)) + 1)) :]
        if head and rng.random() < 0.3:
            head[int(rng.integers(len(head)))] += 1
        words.append((*head, last))
    return msgspec.structs.replace(params, bad_word_ids=tuple(words))


@dataclass
class Case:
    """A state full of rows with random parameters, with the logits and the position of each."""

    all_params: list[SamplingParams]
    prompts: np.ndarray
    positions: np.ndarray
    token_table: np.ndarray
    logits: np.ndarray
    state: SamplingState
    stop_ids: list[tuple[int, ...]]

    def sample(self, rows: np.ndarray):
        metadata = self.state.select(rows, self.positions[rows])
        return Sampler().sample_logits(self.logits[rows], metadata, self.token_table)


def random_case(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Case:
    prompts = rng.integers(1, MAX_LEN // 2, size=num_rows)
    positions = rng.integers(prompts, MAX_LEN)
    token_table = rng.integers(vocab_size, size=(num_rows, MAX_LEN), dtype=np.int32)
    scale = torch.from_numpy(rng.uniform(0.1, 5.0, size=(num_rows, 1)).astype(np.float32))
    logits = (torch.randn(num_rows, vocab_size) * scale).to(torch.bfloat16).to(torch.float32).numpy()
    all_params = [
        bad_words(rng, random_params(rng, vocab_size), tokens[prompt:position].tolist(), row)
        for tokens, prompt, position, row in zip(token_table, prompts, positions, logits, strict=True)
    ]
    stop_ids = [tuple(set(rng.integers(vocab_size, size=2).tolist())) for _ in range(num_rows)]
    state = SamplingState(num_rows, vocab_size)
    for row, params in enumerate(all_params):
        seed = int(rng.integers(-(2**63), 2**63 - 1))
        state.set(new_row(row, params, seed=seed, num_prompt=int(prompts[row]), stop_ids=stop_ids[row]))
    return Case(
        all_params=all_params,
        prompts=prompts,
        positions=positions,
        token_table=token_table,
        logits=logits,
        state=state,
        stop_ids=stop_ids,
    )


@pytest.mark.parametrize("vocab_size", [1, 7, 331, 5001])
def test_every_token_is_possible_and_greedy_ones_are_the_argmax(vocab_size, rng):
    case = random_case(rng, 48, vocab_size)
    token_ids = case.sample(np.arange(48)).token_ids.tolist()
    for row, (token, params) in enumerate(zip(token_ids, case.all_params, strict=True)):
        ids = case.token_table[row].tolist()
        prompt, output = ids[: case.prompts[row]], ids[case.prompts[row] : case.positions[row]]
        processed = process(case.logits[row], params, prompt, output, case.stop_ids[row])
        if np.isneginf(processed).all():
            continue
        if params.is_greedy:
            # Penalties in float32 may order two tokens the other way when they are that close.
            assert processed[token] == pytest.approx(processed.max(), rel=1e-5, abs=1e-5)
        else:
            relaxed = SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=min(1.0, params.top_p + 1e-5),
                min_p=params.min_p * (1 - 1e-5),
            )
            probability = distribution(processed, relaxed)[token]
            least = distribution(processed, relaxed)
            assert probability > 0 or processed[token] >= processed[least > 0].min() - 1e-4


@pytest.mark.parametrize("vocab_size", [7, 331, 5001])
def test_a_row_does_not_depend_on_the_other_rows(vocab_size, rng):
    case = random_case(rng, 32, vocab_size)
    for _ in range(6):
        rows = rng.choice(32, size=rng.integers(2, 33), replace=False)
        together = case.sample(rows)
        told = to_messages(together.logprobs) if together.logprobs is not None else {}
        for index in rng.permutation(len(rows))[:8].tolist():
            alone = case.sample(rows[index : index + 1])
            assert together.token_ids[index] == alone.token_ids[0]
            told_alone = to_messages(alone.logprobs) if alone.logprobs is not None else {}
            assert told.get(index) == told_alone.get(0), "bit for bit"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_of_a_large_vocabulary_does_not_depend_on_the_other_rows(num_threads, rng):
    torch.set_num_threads(num_threads)
    case = random_case(rng, 6, 151_935)
    together = case.sample(np.arange(6)).token_ids
    for row in range(6):
        assert int(case.sample(np.array([row])).token_ids[0]) == int(together[row])


def test_draws_change_with_position_and_seed_and_repeat_with_the_key(rng):
    logits, no_tokens = np.zeros((64, 1000), dtype=np.float32), np.zeros((64, 1), dtype=np.int32)
    params = [SamplingParams()] * 64
    first, again, later = (
        Sampler().sample_logits(logits, metadata_of(params, 1000, position), no_tokens).token_ids
        for position in (5, 5, 6)
    )
    assert np.array_equal(first, again)
    assert len(np.unique(first)) > 32
    assert int((first != later).sum()) > 32


class OnlyArgmax:
    """A head that nobody may ask for its logits; outputs stand for these."""

    def logits(self, outputs: np.ndarray) -> np.ndarray:
        raise AssertionError("the largest is enough")

    def argmax(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(-1)


def test_only_greedy_rows_take_the_short_way_and_logprobs_are_of_the_logits_as_they_came(rng):
    logits, no_tokens = rng.normal(size=(8, 5001)).astype(np.float32), np.zeros((8, 1), dtype=np.int32)
    before = torch.from_numpy(logits.copy())
    metadata = metadata_of([SamplingParams(temperature=0.0)] * 8, 5001)
    assert metadata.only_argmax
    head = OnlyArgmax()
    sampled = Sampler().sample(Outputs(head, logits), metadata, no_tokens)
    assert np.array_equal(sampled.token_ids, logits.argmax(-1))
    assert sampled.logprobs is None
    rich = [SamplingParams(temperature=0.0, logit_bias={1: 100.0}, repetition_penalty=1.5, logprobs=0)] * 8
    sampled = Sampler().sample_logits(logits, metadata_of(rich, 5001), no_tokens)
    assert (sampled.token_ids == 1).all()
    assert sampled.logprobs is not None
    np.testing.assert_allclose(sampled.logprobs.logprobs, before.double().log_softmax(-1)[:, 1].numpy(), rtol=1e-6)


def test_stop_ids_are_masked_until_min_tokens_are_out(rng):
    state = SamplingState(2, 50)
    params = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=9, logit_bias={4: 100.0, 5: 99.0})
    for row in range(2):
        state.set(new_row(row, params, num_prompt=10, stop_ids=(4,) if row == 0 else ()))
    logits, token_table = np.zeros((2, 50), dtype=np.float32), np.zeros((2, 30), dtype=np.int32)
    picked = [
        Sampler()
        .sample_logits(logits.copy(), state.select(np.arange(2), np.full(2, at)), token_table)
        .token_ids.tolist()
        for at in range(10, 15)
    ]
    assert picked == [[5, 4], [5, 4], [5, 4], [4, 4], [4, 4]]


@pytest.mark.parametrize("extreme", [5e-324, 1e-40, 1e300, 1.7e308])
def test_extreme_parameters_leave_a_choice(extreme):
    all_params = [
        SamplingParams(repetition_penalty=extreme, logprobs=1),
        SamplingParams(temperature=0.0, repetition_penalty=extreme),
        SamplingParams(temperature=min(extreme, 2.0), top_p=min(extreme, 1.0)),
        SamplingParams(min_p=min(extreme, 1.0), top_k=2**31 - 1),
        SamplingParams(logit_bias={3: extreme, 4: -extreme}),
    ]
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        metadata = metadata_of(all_params, 300, 3)
    logits = np.zeros((5, 300), dtype=np.float32)
    logits[:, 7] = 9.0
    token_table = np.full((5, 4), 9, dtype=np.int32)
    token_ids = Sampler().sample_logits(logits, metadata, token_table).token_ids.tolist()
    assert all(0 <= token < 300 for token in token_ids)
    assert token_ids[1] == 7


def test_a_row_that_samples_for_several_positions_draws_as_it_does_one_by_one(rng):
    case = random_case(rng, 6, 331)
    rows = np.repeat(np.arange(6), 3)
    positions = np.minimum(case.positions[rows] + np.tile(np.arange(3), 6), MAX_LEN - 1)
    logits = rng.normal(size=(18, 331)).astype(np.float32)
    together = Sampler().sample_logits(logits.copy(), case.state.select(rows, positions), case.token_table).token_ids
    for index in range(18):
        metadata = case.state.select(rows[index : index + 1], positions[index : index + 1])
        alone = Sampler().sample_logits(logits[index : index + 1].copy(), metadata, case.token_table).token_ids
        assert int(together[index]) == int(alone[0])


def test_rows_that_were_drawn_already_keep_their_tokens_unless_they_ask_for_more(rng):
    params = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=5)]
    logits, no_tokens = torch.randn(3, 40), torch.zeros((3, 1), dtype=torch.int32)
    plain, biased = metadata_of(params, 40), metadata_of([*params[:2], SamplingParams(logit_bias={7: 100.0})], 40)
    sampler = Sampler(reference.draw)
    for metadata in (plain, biased):
        draws = torch.from_numpy(metadata.draws)
        drawn = Drawn(logits.clone(), draws, sampler.draw(logits, draws))
        want = Sampler().sample_logits(logits.numpy().copy(), metadata, no_tokens.numpy()).token_ids
        assert np.array_equal(sample_drawn(sampler, drawn, metadata, no_tokens).token_ids.numpy(), want)
    assert sample_drawn(sampler, drawn, plain, no_tokens).token_ids is drawn.token_ids


def test_logits_of_half_precision_are_widened_where_a_row_asks_for_more(rng: np.random.Generator) -> None:
    """As on a GPU, whose kernel reads them as they are."""
    sampler = Sampler(lambda logits, draws: reference.draw(logits.float(), draws))
    plain, more = SamplingParams(seed=5), SamplingParams(seed=6, logit_bias={7: 0.3}, logprobs=2)
    halves, no_tokens = torch.randn(2, 40).bfloat16(), torch.zeros((2, 1), dtype=torch.int32)
    for params in ([plain, plain], [plain, more]):
        metadata = metadata_of(params, 40)
        draws = torch.from_numpy(metadata.draws)
        got, want = (
            sample_drawn(sampler, Drawn(logits.clone(), draws, sampler.draw(logits, draws)), metadata, no_tokens)
            for logits in (halves, halves.float())
        )
        assert torch.equal(got.token_ids, want.token_ids)
        if want.logprobs is not None:
            assert got.logprobs is not None
            assert torch.equal(got.logprobs.logprobs, want.logprobs.logprobs)
            assert torch.equal(got.logprobs.top_logprobs, want.logprobs.top_logprobs)
