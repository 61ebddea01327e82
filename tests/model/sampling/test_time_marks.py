"""Rules on marks of time, against transformers' processor of the same logits."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from tests.tiers import scaled
from tokenmill.core.plan import AdmittedRequest
from tokenmill.core.sampling_params import SamplingParams, TimeRules
from tokenmill.model.sampling.state import SamplingState
from tokenmill.model.sampling.time_marks import apply_time_marks

VOCAB, END, BEGIN, ROWS, LENGTH = 90, 50, 60, 6, 24
RULES = TimeRules(BEGIN, END, BEGIN + 9)


def oracle(tokens: list[int], num_prompt: int, logits: np.ndarray) -> np.ndarray:
    config = transformers.GenerationConfig(
        no_timestamps_token_id=BEGIN - 1, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=9
    )
    process = WhisperTimeStampLogitsProcessor(config, begin_index=num_prompt)
    return process(torch.tensor([tokens]), torch.from_numpy(logits[None].copy()))[0].numpy()


def output_of(rng: np.random.Generator, length: int) -> list[int]:
    """Return an output as the rules allow: words between marks that come in pairs and never go back."""
    found: list[int] = []
    mark = BEGIN + int(rng.integers(0, 4))
    while len(found) < length:
        found += [mark, *rng.integers(0, END, int(rng.integers(1, 4))).tolist()]
        mark += int(rng.integers(1, 4))
        found.append(min(mark, VOCAB - 1))
    return found[:length]


def test_logits_are_those_of_transformers(rng: np.random.Generator) -> None:
    for _ in range(scaled(60)):
        table = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        state, params = SamplingState(ROWS, VOCAB), SamplingParams(temperature=0, time_rules=RULES)
        rows = rng.permutation(ROWS)[: int(rng.integers(1, ROWS + 1))]
        positions, prompts = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        free = rng.random(len(rows)) < 0.3
        for index, row in enumerate(rows):
            prompts[index] = rng.integers(2, 6)
            output = output_of(rng, int(rng.integers(0, 16)))
            positions[index] = prompts[index] + len(output)
            table[row, prompts[index] : positions[index]] = output
            own = SamplingParams(temperature=0, logprobs=1) if free[index] else params
            state.set(AdmittedRequest(int(row), "", table[row], int(prompts[index]), own, (), 0))
        logits = (rng.standard_normal((len(rows), VOCAB)) * rng.choice([0.5, 4.0])).astype(np.float32)
        expected = [
            one if is_free else oracle(table[row, :position].tolist(), int(prompt), one)
            for one, is_free, row, position, prompt in zip(logits, free, rows, positions, prompts, strict=True)
        ]
        marks = state.select(rows, positions).time_marks
        assert (marks is None) == free.all()
        found = logits.copy()
        if marks is not None:
            apply_time_marks(found, marks, table)
        np.testing.assert_array_equal(found, np.stack(expected))


def test_a_step_without_marks_has_no_part_for_them() -> None:
    state = SamplingState(2, VOCAB)
    state.set(AdmittedRequest(0, "", np.zeros(3, np.int32), 3, SamplingParams(temperature=0), (), 0))
    metadata = state.select(np.array([0]), np.array([3]))
    assert metadata.time_marks is None
    assert not metadata.changes_logits
