"""The definition of sampling, one row at a time in float64 with full sorts: slow, obvious, the judge of the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import AdmittedRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.sampling.draws import RECORD, PackedDraws, describe, pack
from tokenmill.model.sampling.sampler import Sampler
from tokenmill.model.sampling.state import SamplingMetadata, SamplingState

Floats = npt.NDArray[np.float64]


def process(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
) -> Floats:
    """Logits of one row after bias, penalties and the min_tokens mask."""
    processed = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        processed[token] += min(max(bias, -100.0), 100.0)
    for token in {*prompt, *output}:
        if processed[token] > 0:
            processed[token] /= params.repetition_penalty
        else:
            processed[token] *= params.repetition_penalty
    for token in set(output):
        processed[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        processed[list(stop_ids)] = -np.inf
    if params.allowed_token_ids is not None:
        processed[[token for token in range(len(logits)) if token not in set(params.allowed_token_ids)]] = -np.inf
    for *head, last in params.bad_word_ids:
        if list(output[len(output) - len(head) :]) == head:
            processed[last] = -np.inf
    return processed


def ranked(logits: Floats) -> npt.NDArray[np.int64]:
    """Ids by rank: larger logit first, equal ones by id."""
    return np.lexsort((np.arange(len(logits)), -logits))


def distribution(logits: Floats, params: SamplingParams) -> Floats:
    """Exact probabilities [V] of a row's processed logits under temperature, min-p, top-k and top-p."""
    if params.is_greedy:
        return np.eye(len(logits))[int(ranked(logits)[0])]
    scaled = (logits - logits.max()) / params.temperature
    weights = np.exp(scaled)
    weights[weights < params.min_p] = 0.0
    order = ranked(logits)
    if 0 < params.top_k < len(logits):
        weights[order[params.top_k :]] = 0.0
    weights /= weights.sum()
    if params.top_p < 1.0:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= params.top_p]] = 0.0
    return weights / weights.sum()


def has_close_call(logits: Floats, params: SamplingParams) -> bool:
    """Return True if a filter's border lies so near a token that float32 may see it on the other side."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    close = bool((np.abs(weights - params.min_p) < 1e-6 * params.min_p).any())
    if params.top_p < 1.0:
        whole = distribution(
            logits, SamplingParams(temperature=params.temperature, top_k=params.top_k, min_p=params.min_p)
        )
        close |= bool((np.abs(np.cumsum(whole[ranked(logits)]) - params.top_p) < 3e-6).any())
    return close


def new_row(
    row: int, params: SamplingParams, *, seed: int = 0, num_prompt: int = 1, stop_ids: tuple[int, ...] = ()
) -> AdmittedRequest:
    """A request on `row` with a prompt of `num_prompt` tokens."""
    return AdmittedRequest(row, f"r{row}", np.zeros(num_prompt, dtype=np.int32), num_prompt, params, stop_ids, seed)


def draws_of(params: SamplingParams, vocab_size: int, uniforms: npt.NDArray[np.float64]) -> PackedDraws:
    """Packed draws with the same parameters and these uniform numbers."""
    records = np.array([describe(params, vocab_size)] * len(uniforms), dtype=RECORD)
    records["uniform"] = uniforms
    return pack(records)


def metadata_of(
    all_params: Sequence[SamplingParams], vocab_size: int, positions: Sequence[int] | int = 1
) -> SamplingMetadata:
    """Row i with the i-th parameters and seed i."""
    state = SamplingState(len(all_params), vocab_size)
    for row, params in enumerate(all_params):
        state.set(new_row(row, params, seed=row))
    return state.select(np.arange(len(all_params)), np.broadcast_to(np.asarray(positions), (len(all_params),)))


def draw_many(logits: npt.NDArray[np.float32], params: SamplingParams, count: int, seed: int) -> npt.NDArray[np.int64]:
    """`count` draws for the same logits: a hundred seeds, and consecutive positions of each."""
    state = SamplingState(100, len(logits))
    for row in range(100):
        state.set(new_row(row, params, seed=seed + row))
    rows = np.repeat(np.arange(100), count // 100)
    positions = np.tile(np.arange(1, count // 100 + 1), 100)
    same, no_tokens = np.tile(logits, (500, 1)), np.zeros((100, 1), dtype=np.int32)
    drawn = [
        Sampler()
        .sample_logits(same[: len(part)], state.select(part, positions[start : start + 500]), no_tokens)
        .token_ids
        for start in range(0, count, 500)
        if len(part := rows[start : start + 500])
    ]
    return np.concatenate(drawn)


def chi_square_deviate(counts: npt.NDArray[np.int64], probabilities: Floats) -> float:
    """Return the distance of counts from probabilities, in standard deviations of the chi-square distribution.

    Categories are merged so that each expects at least 5; the statistic becomes a normal deviate by Wilson and
    Hilferty's transform. 0 where a single category is left, which gets all that there are.
    """
    order = np.argsort(probabilities)
    expected, observed = [0.0], [0]
    for index in order:
        if expected[-1] >= 5.0:
            expected.append(0.0)
            observed.append(0)
        expected[-1] += float(probabilities[index]) * counts.sum()
        observed[-1] += int(counts[index])
    if len(expected) > 1 and expected[-1] < 5.0:
        expected[-2:] = [sum(expected[-2:])]
        observed[-2:] = [sum(observed[-2:])]
    degrees = len(expected) - 1
    if degrees == 0:
        return 0.0
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    spread = 2.0 / (9.0 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread)
