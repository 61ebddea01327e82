"""Budgets of thinking in an engine: exact, and the same tokens whatever disturbs and whoever drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from tests.model.structured.test_lazy_rows import QUESTION, grammar_of
from tests.model.structured.test_timing import Outputs, differing, disturb, run, running
from tests.seeding import seed_for
from tests.tiers import scaled
from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest, GenerateText
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.demo import demo_model_path
from tokenmill.engine.loop.control import go_on
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.sampling.thoughts import Thoughts
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, Thinking
from tokenmill.serving.frontend.prompt_encoder import PromptEncoder
from tokenmill.serving.frontend.prompt_processor import answer_grammar
from tokenmill.serving.frontend.thinking_budget import with_budget
from tokenmill.serving.frontend.tokenizer import Tokenizer
from tokenmill.startup.assembly.setup import build_engine

SEED = seed_for(__name__)
SCHEMA = '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false}'
MESSAGE = "\nThat is enough.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo_model_path())


def budgeted(tokenizer: Tokenizer, kind: str, thinking: Thinking, most: int) -> Grammar:
    builder = GrammarBuilder(PromptEncoder(tokenizer, None))
    grammar = None
    if kind == "schema":
        grammar = answer_grammar(builder, StructuredOutputs(json=SCHEMA), None, None, thinking)
    elif kind == "calls":
        grammar = grammar_of(tokenizer, "hermes", thinking)
    message = GenerateText(ids=["a"], params=SamplingParams(), end_of_thinking=MESSAGE)
    return with_budget(grammar, message, thinking, most, tokenizer)


def drawn(tokenizer: Tokenizer, rng: random.Random, number: int) -> AddRequest:
    thinking = Thinking("<think>", "</think>", rng.random() < 0.7)
    grammar = budgeted(tokenizer, rng.choice(["free", "schema", "calls"]), thinking, rng.choice([0, 1, 5, 20]))
    liked = {
        tokenizer.encode(word, add_special_tokens=False)[0]: rng.choice([0.0, 4.0]) for word in ("<think>", "</think>")
    }
    extras: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 30}, {"temperature": 0.0}, {"logprobs": 1}]
    fields = {"temperature": 1.5, "max_tokens": 60, "logit_bias": liked, **rng.choice(extras)}
    params = SamplingParams(**fields, seed=rng.randrange(2**63), grammar=grammar)
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False)
    return AddRequest(id=str(number), prompt_token_ids=prompt, params=params, output_token_ids=[])


def copied(requests: list[AddRequest]) -> list[AddRequest]:
    return [msgspec.structs.replace(one, output_token_ids=[]) for one in requests]


@contextmanager
def drafting(method: str) -> Iterator[Engine]:
    spec = f'{{"method": "{method}", "num_speculative_tokens": 6}}'
    sizes: dict[str, Any] = {"page_size": 16, "num_pages": 48, "max_num_seqs": 24, "max_num_batched_tokens": 96}
    config = EngineConfig(
        model=str(demo_model_path()), dtype="bfloat16", num_threads=1, speculative_config=spec, **sizes
    )
    engine = build_engine(config.resolve()).engine
    try:
        yield engine
    finally:
        engine.close()


def check(requests: list[AddRequest], outputs: Outputs) -> int:
    """Every answer keeps its budget; return how many were ended by it."""
    num_ended = 0
    for request, (tokens, _, reason, error) in zip(requests, outputs, strict=True):
        assert error is None
        budget = request.params.grammar.thinking
        thoughts = Thoughts(budget)
        for token in tokens:
            assert not thoughts.refuses(token), (request, tokens)
            thoughts.add_token(token)
            assert thoughts.num_tokens <= budget.most
        text = tuple(tokens)
        num_ended += any(text[at : at + len(budget.forced)] == budget.forced for at in range(len(text)))
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    return num_ended


def test_budgets_are_exact_alone_preempted_overlapped_and_with_drafts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    requests = [drawn(tokenizer, rng, number) for number in range(scaled(16))]
    with running(demo_model_path(), overlap=False) as engine:
        want = run(engine, copied(requests))
        assert check(requests, want) > len(requests) // 3
        alone = rng.sample(range(len(requests)), 6)
        for number in alone:
            assert run(engine, copied([requests[number]]))[0] == want[number]
    with drafting("suffix") as engine:
        assert not differing(requests, run(engine, copied(requests)), want)
        assert not differing(requests, run(engine, copied(requests), rng), want)
        assert engine.stats().num_accepted_tokens
    disturb(monkeypatch, rng)
    with running(demo_model_path(), overlap=False) as engine:
        assert not differing(requests, run(engine, copied(requests), rng), want)
    with running(demo_model_path(), overlap=True) as engine:
        assert not differing(requests, run(engine, copied(requests), rng), want)


def test_an_answer_within_its_budget_is_the_one_without(tokenizer: Tokenizer) -> None:
    rng = random.Random(SEED)
    requests = [drawn(tokenizer, rng, number) for number in range(scaled(12))]
    for number, request in enumerate(requests):
        grammar = budgeted(tokenizer, "free", Thinking("<think>", "</think>", True), 1000)
        requests[number] = msgspec.structs.replace(
            request, params=msgspec.structs.replace(request.params, grammar=grammar)
        )
    plain = [msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, grammar=None)) for one in requests]
    with running(demo_model_path(), overlap=False) as engine:
        want = run(engine, copied(plain))
        assert not differing(requests, run(engine, copied(requests)), want)


def test_an_engine_that_goes_on_for_another_draws_the_same(tokenizer: Tokenizer) -> None:
    rng = random.Random(SEED)
    requests = [drawn(tokenizer, rng, number) for number in range(scaled(12))]
    with running(demo_model_path(), overlap=False) as engine:
        want = run(engine, copied(requests))
        cuts = [rng.randrange(len(tokens)) for tokens, *_ in want]
        begun = [
            msgspec.structs.replace(one, output_token_ids=tokens[:cut])
            for one, cut, (tokens, *_) in zip(requests, cuts, want, strict=True)
        ]
        rest = run(engine, begun)
        assert [tokens for tokens, *_ in rest] == [tokens[cut:] for cut, (tokens, *_) in zip(cuts, want, strict=True)]


def ended(request: AddRequest) -> AddRequest:
    """The same request, whose thinking ends at once."""
    grammar = request.params.grammar
    now = msgspec.structs.replace(grammar, thinking=msgspec.structs.replace(grammar.thinking, most=0))
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, grammar=now))


@pytest.mark.parametrize("overlap", [False, True])
def test_thinking_that_is_ended_while_it_runs_goes_on_as_if_begun_again_there(
    tokenizer: Tokenizer, overlap: bool
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    requests = {request.id: request for request in (drawn(tokenizer, rng, number) for number in range(scaled(12)))}
    tokens: dict[str, list[int]] = {one: [] for one in requests}
    cuts: dict[str, int] = {}

    def take(outputs: list[Any]) -> None:
        for output in outputs:
            assert output.error is None
            tokens[output.id].extend(output.token_ids)

    with running(demo_model_path(), overlap=overlap) as engine:
        for request in copied(list(requests.values())):
            engine.add(request)
        while engine.has_work:
            alive = [one for one in engine.scheduler.requests if one not in cuts]
            if alive and rng.random() < 0.3:
                number = rng.choice(alive)
                take(go_on(engine, ended(requests[number]), take))
                if number in engine.scheduler.requests:
                    cuts[number] = len(tokens[number])
            take(engine.step())
        assert len(cuts) > len(requests) // 3
        whole = dict(zip(requests, run(engine, copied(list(requests.values()))), strict=True))
        for number, cut in cuts.items():
            assert tokens[number][:cut] == whole[number][0][:cut]
            begun = msgspec.structs.replace(ended(requests[number]), output_token_ids=tokens[number][:cut])
            assert run(engine, [begun])[0][0] == tokens[number][cut:]
