"""A constrained draw depends on logits, mask, parameters, seed and position, and on nothing that timing decides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.model.structured.schemas import random_schema
from tests.seeding import seed_for
from tests.tiers import scaled
from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import TokenLogprobs
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.sampling import grammar_rows
from tokenmill.model.sampling.row_grammar import RowGrammar
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.startup.assembly.setup import build_engine

SEED = seed_for(__name__)
NUM_SCHEMAS = scaled(40)
NUM_ALONE = scaled(10)
# "a" and "e", at which some requests stop: what a grammar allows may be the end of an answer.
LETTERS = (64, 68)

# Of each request its tokens, their log probabilities, how it ended, and why, if that was an error.
Outputs = list[tuple[list[int], list[TokenLogprobs], FinishReason | None, str | None]]


class NoMarkers:
    def token_id(self, token: str) -> int | None:
        return None


def grammar_of(outputs: StructuredOutputs) -> Any:
    builder = GrammarBuilder(NoMarkers())
    return builder.grammar([builder.answer(outputs)], "structured_outputs")


def draw_request(rng: random.Random, number: int) -> AddRequest:
    """A schema and parameters of any kind; most have none but a temperature, where a draw comes first."""
    extras: list[dict[str, Any]] = [
        {"min_tokens": rng.randint(1, 12)},
        {"stop_token_ids": LETTERS, "min_tokens": rng.randint(0, 12)},
        {"logit_bias": {rng.randrange(331): rng.uniform(-5, 5) for _ in range(5)}},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"bad_word_ids": tuple((rng.randrange(60, 90),) for _ in range(3))},
        {"allowed_token_ids": tuple(range(331))},
        {"logprobs": 2},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.0},
    ]
    params = SamplingParams(
        **{"temperature": 1.0, "max_tokens": 32, **(rng.choice(extras) if rng.random() < 0.5 else {})},
        seed=rng.randrange(2**63),
        grammar=grammar_of(StructuredOutputs(json=random_schema(rng))),
    )
    prompt = [rng.randrange(256) for _ in range(rng.choice([3, 3, 10, 40]))]
    return AddRequest(id=str(number), prompt_token_ids=prompt, params=params)


@contextmanager
def running(model: Path, overlap: bool) -> Iterator[Engine]:
    # Native attention, which takes pages of 16: there a token has the same bits in a decode and in a recomputed chunk.
    sizes: dict[str, Any] = {"page_size": 16, "num_pages": 24, "max_num_seqs": 24, "max_num_batched_tokens": 64}
    config = EngineConfig(model=str(model), dtype="bfloat16", num_threads=1, async_scheduling=overlap, **sizes)
    engine = build_engine(config.resolve()).engine
    try:
        yield engine
    finally:
        engine.close()


def run(engine: Engine, requests: list[AddRequest], preempts: random.Random | None = None) -> Outputs:
    """Return each request's samples and its end; `preempts` decides when all that run are preempted."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    logprobs: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
    ends: dict[str, tuple[FinishReason | None, str | None]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        if preempts is not None and preempts.random() < 0.05:
            engine.reset_prefix_cache(preempt_running=True)
        for output in engine.step():
            tokens[output.id].extend(output.token_ids)
            logprobs[output.id].extend(output.logprobs or ())
            ends[output.id] = output.finish_reason, output.error
    return [(tokens[request.id], logprobs[request.id], *ends[request.id]) for request in requests]


class SometimesSlow:
    """In place of an attribute: half of what is said to be fast is not."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __get__(self, row: RowGrammar, _: type) -> bool:
        return bool(row.__dict__["slow"])

    def __set__(self, row: RowGrammar, is_slow: bool) -> None:
        row.__dict__["slow"] = is_slow or self._rng.random() < 0.5


def differing(requests: list[AddRequest], got: Outputs, want: Outputs) -> list[Any]:
    return [case for case in zip(requests, got, want, strict=True) if case[1] != case[2]]


def disturb(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Half of the time a row is taken for a slow one: its mask is filled beside the steps, and no step waits for it."""
    monkeypatch.setattr(RowGrammar, "is_slow", SometimesSlow(rng), raising=False)
    monkeypatch.setattr(grammar_rows, "PATIENCE", 0.0)


def test_a_row_samples_the_same_alone_in_a_batch_preempted_overlapped_and_with_late_masks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    requests = [draw_request(rng, number) for number in range(NUM_SCHEMAS)]
    some = rng.sample(range(NUM_SCHEMAS), NUM_ALONE)
    with running(model, overlap=False) as engine:
        in_a_batch = run(engine, requests)
        alone = [run(engine, [requests[number]])[0] for number in some]
        disturb(monkeypatch, rng)
        preempted = run(engine, [requests[number] for number in some], rng)
    for outputs in (alone, preempted):
        assert not differing([requests[number] for number in some], outputs, [in_a_batch[number] for number in some])
    with running(model, overlap=True) as engine:
        assert not differing(requests, run(engine, requests, rng), in_a_batch)
        assert engine.stats().num_preemptions > 20
