"""Rows whose grammar begins with a call: the same tokens however little the matcher is asked, and whatever disturbs."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest

from tests.model.structured.test_lazy_calls import FUNCTIONS, TOOLS
from tests.model.structured.test_timing import differing, disturb, run, running
from tests.seeding import seed_for
from tests.tiers import scaled
from tokenmill.config.model_files import eos_token_ids
from tokenmill.core.messages import AddRequest, CallRules
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, Thinking
from tokenmill.serving.frontend.prompt_encoder import PromptEncoder
from tokenmill.serving.frontend.prompt_processor import answer_grammar
from tokenmill.serving.frontend.tokenizer import Tokenizer

SEED = seed_for(__name__)
NOTATIONS = ("hermes", "qwen3_coder", "llama3_json", "granite", "pythonic")
QUESTION = "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\n"


def grammar_of(tokenizer: Tokenizer, notation: str, thinking: Thinking | None) -> Grammar:
    rules = CallRules(notation, list(FUNCTIONS), is_required=False, is_parallel=True, is_lazy=True)
    grammar = answer_grammar(GrammarBuilder(PromptEncoder(tokenizer, None)), None, rules, TOOLS, thinking)
    assert grammar is not None
    return grammar


def drawn(tokenizer: Tokenizer, rng: random.Random, number: int) -> AddRequest:
    """A request that likes to begin and to end calls, with parameters of any kind."""
    thinking = rng.choice([None, Thinking("<think>", "</think>", False), Thinking("<think>", "</think>", True)])
    words = ("<tool_call>", "</tool_call>", "<", "{", "}", '"', "</think>", "[get(", "functools")
    liked = {token: 4.0 for word in words for token in tokenizer.encode(word, add_special_tokens=False)[:1]}
    extras: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 30},
        {"temperature": 0.0},
        {"min_tokens": 20},
        {"logprobs": 1},
        {"stop_token_ids": (64, 68), "min_tokens": 10},
    ]
    params = SamplingParams(
        **{"temperature": 2.0, "max_tokens": 60, "logit_bias": liked, **rng.choice(extras)},
        seed=rng.randrange(2**63),
        grammar=grammar_of(tokenizer, rng.choice(NOTATIONS), thinking),
    )
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False)
    return AddRequest(id=str(number), prompt_token_ids=prompt, params=params, output_token_ids=[])


def asked_each_time(request: AddRequest) -> AddRequest:
    """The same request, with a grammar that does not say what free text is."""
    assert request.params.grammar is not None
    text = request.params.grammar.text.replace("// optional", "// asked")
    grammar = msgspec.structs.replace(request.params.grammar, text=text + " ", marks=None)
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, grammar=grammar))


def test_a_brace_is_heard_where_any_token_may_stand_at_the_place_of_a_call() -> None:
    folder = demo_model_path()
    tokenizer = Tokenizer.load(folder)
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        logit_bias={brace: 100.0},
        grammar=grammar_of(tokenizer, "llama3_json", None),
    )
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False)
    request = AddRequest(id="0", prompt_token_ids=prompt, params=params, output_token_ids=[])
    for overlap in (False, True):
        with running(folder, overlap=overlap) as engine:
            ((tokens, _, _, error),) = run(engine, [request])
        assert error is None
        assert re.match(r'\{\s*"name"', tokenizer.decode(tokens)), tokenizer.decode(tokens)


def test_free_text_that_no_matcher_hears_of_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    folder = demo_model_path()
    tokenizer = Tokenizer.load(folder)
    assert eos_token_ids(folder)
    requests = [drawn(tokenizer, rng, number) for number in range(scaled(16))]
    with running(folder, overlap=False) as engine:
        want = run(engine, [asked_each_time(request) for request in requests])
        assert all(error is None for *_, error in want), want
        assert not differing(requests, run(engine, requests), want)
        disturb(monkeypatch, rng)
        assert not differing(requests, run(engine, requests, rng), want)
    with running(folder, overlap=True) as engine:
        assert not differing(requests, run(engine, requests, rng), want)
