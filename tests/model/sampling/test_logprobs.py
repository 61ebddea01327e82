from __future__ import annotations

import math

import numpy as np
import pytest

from tests.model.sampling.oracle import metadata_of, ranked
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.sampling.logprobs import LOWEST_LOGPROB, to_messages
from tokenmill.model.sampling.sampler import Sampler


def reports_of(logits: np.ndarray, all_params: list[SamplingParams]):
    no_tokens = np.zeros((len(logits), 4), dtype=np.int32)
    sampled = Sampler().sample_logits(logits, metadata_of(all_params, logits.shape[1], 2), no_tokens)
    assert sampled.logprobs is not None
    return sampled.token_ids.tolist(), to_messages(sampled.logprobs)


@pytest.mark.parametrize("vocab_size", [5, 331, 5001])
def test_reports_are_those_of_the_raw_logits(vocab_size, rng):
    logits = np.round(rng.normal(size=(6, vocab_size)) * 3, 2).astype(np.float32)
    wanted = [0, 3, None, 5, 1, None]
    shared = {"temperature": 0.7, "logit_bias": {1: 4.0}, "top_p": 0.8, "repetition_penalty": 1.3}
    token_ids, reports = reports_of(logits.copy(), [SamplingParams(logprobs=count, **shared) for count in wanted])
    assert sorted(reports) == [0, 1, 3, 4]
    for row, report in reports.items():
        raw = logits[row].astype(np.float64)
        exact = raw - raw.max() - math.log(np.exp(raw - raw.max()).sum())
        order = ranked(raw).tolist()
        assert report.sampled.token_id == token_ids[row]
        assert report.sampled.logprob == pytest.approx(exact[token_ids[row]], rel=1e-5, abs=1e-5)
        assert report.sampled.rank == order.index(token_ids[row]) + 1
        assert [one.token_id for one in report.top] == order[: wanted[row]]
        assert [one.rank for one in report.top] == list(range(1, wanted[row] + 1))
        assert [one.logprob for one in report.top] == pytest.approx(
            exact[order[: wanted[row]]].tolist(), rel=1e-5, abs=1e-5
        )


def test_more_logprobs_than_tokens_gives_all_tokens():
    _, reports = reports_of(np.array([[1.0, 2.0]], np.float32), [SamplingParams(logprobs=20)])
    assert [one.token_id for one in reports[0].top] == [1, 0]


def test_an_impossible_token_is_reported_with_a_finite_number():
    logits = np.full((1, 10), -np.inf, dtype=np.float32)
    logits[0, 4] = 0.0
    _, reports = reports_of(logits, [SamplingParams(logprobs=2)])
    assert reports[0].sampled.logprob == 0.0
    assert [one.logprob for one in reports[0].top] == [0.0, LOWEST_LOGPROB]
