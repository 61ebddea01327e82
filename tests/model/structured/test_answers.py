"""Answers of a random model, which are right by their grammar alone, against the `jsonschema` package and `re`."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.model.structured.schemas import FORMATS, random_schema
from tests.seeding import seed_for
from tests.tiers import scaled
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import FinishReason
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.llm.outputs import CompletionOutput

SEED = seed_for(__name__)
# Chunks of prompts, a prefix cache, and pages for one long request and little else: two preempt each other, however
# slowly their grammars are compiled. Masks must survive all of that.
TIGHT: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 40,
    "page_size": 8,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 24,
}
# Two of these answers are more than the pages hold, so that somebody is preempted whatever else is drawn.
LONG: dict[str, Any] = {"type": "string", "minLength": 150, "maxLength": 160}


def params(number: int, **outputs: Any) -> SamplingParams:
    outputs = StructuredOutputs(**outputs)
    return SamplingParams(max_tokens=180, seed=SEED + number, structured_outputs=outputs, temperature=1.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_match_their_schemas(model: Path, overlap: bool) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + overlap)
    schemas = [LONG, LONG, *(random_schema(rng) for _ in range(scaled(30)))]
    lengths = [130, 130, *rng.choices([3, 3, 40, 130], k=len(schemas) - 2)]
    prompts = [rng.choices(range(256), k=length) for length in lengths]
    with LLM(model, async_scheduling=overlap, **TIGHT) as llm:
        asked = [params(number, json=schema) for number, schema in enumerate(schemas)]
        # Compiled before: who waits for a grammar preempts nobody.
        llm.generate(prompts, [msgspec.structs.replace(one, max_tokens=1) for one in asked], use_tqdm=False)
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        num_preemptions = llm.stats().num_preemptions
    num_complete = 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (schema, answer)
        if answer.finish_reason is FinishReason.STOP:
            num_complete += schema is not LONG
            jsonschema.validate(json.loads(answer.text), schema, format_checker=FORMATS)
    assert num_complete > 0.8 * (len(schemas) - 2)
    assert num_preemptions > 0


def test_greedy_answers_are_those_of_masks_wherever_rows_draw_first(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    prompts = [[rng.randrange(256) for _ in range(rng.choice([3, 40]))] for _ in range(20)]
    asked = [
        SamplingParams(max_tokens=60, temperature=0.0, structured_outputs=StructuredOutputs(json=random_schema(rng)))
        for _ in prompts
    ]
    asked[::4] = [SamplingParams(max_tokens=60, temperature=0.0)] * 5

    def answers() -> list[list[int]]:
        with LLM(model, **TIGHT) as llm:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    drawn_first = answers()
    monkeypatch.setattr(SamplingParams, "is_filtered", True)  # of such rows masks are filled before they draw
    assert answers() == drawn_first


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with LLM(model, dtype="float32", num_pages=400) as llm:
        yield llm


def answers(llm: LLM, asked: SamplingParams, count: int = 6) -> list[CompletionOutput]:
    outputs = llm.generate([[number + 1, 2] for number in range(count)], asked, use_tqdm=False)
    return [answer for output in outputs for answer in output.outputs]


@pytest.mark.parametrize("regex", [r"[ab]{3}-[0-9]{2}", r"(GET|POST) /[a-z]{1,5}", r"x\/y\\z", "é+\\n?", "a{2}|b"])
def test_a_regex_matches_the_whole_answer(llm: LLM, regex: str) -> None:
    for answer in answers(llm, params(1, regex=regex)):
        if answer.finish_reason is FinishReason.STOP:
            assert re.fullmatch(regex, answer.text), answer.text


def test_choices_of_any_characters(llm: LLM) -> None:
    choices = ('a"b', "line\nbreak", "back\\slash", "é", "/regex/", "<|im_end|>", "%json {}")
    assert {answer.text for answer in answers(llm, params(2, choice=choices), 60)} <= set(choices)


def test_a_lark_grammar(llm: LLM) -> None:
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]?/\n'
    found = [answer for answer in answers(llm, params(3, grammar=grammar)) if answer.finish_reason is FinishReason.STOP]
    assert all(re.fullmatch(r"[1-9]\d?(\+[1-9]\d?)*", answer.text) for answer in found)


def test_continuations_follow_the_grammar_each_on_its_own(llm: LLM) -> None:
    asked = params(4, regex="[a-z]{8}")
    texts = [a.text for a in answers(llm, SamplingParams(n=8, seed=1, structured_outputs=asked.structured_outputs), 1)]
    assert len(set(texts)) > 4
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)


def test_min_tokens_keep_the_end_away_while_the_grammar_allows_more(llm: LLM) -> None:
    eager = SamplingParams(max_tokens=60, min_tokens=20, structured_outputs=StructuredOutputs(regex="a*"))
    assert all(len(answer.token_ids) >= 20 for answer in answers(llm, eager))
    full = SamplingParams(max_tokens=60, min_tokens=20, structured_outputs=StructuredOutputs(regex="ab"))
    answer = answers(llm, full, 1)[0]
    assert (answer.text, answer.finish_reason) == ("ab", FinishReason.STOP)


def test_stop_strings_and_max_tokens_end_an_answer_before_its_grammar_does(llm: LLM) -> None:
    outputs = StructuredOutputs(regex="[a-c]{40}")
    stopped = answers(llm, SamplingParams(stop=("b",), structured_outputs=outputs, max_tokens=60), 3)
    assert all("b" not in answer.text for answer in stopped)
    cut = answers(llm, SamplingParams(structured_outputs=outputs, max_tokens=5), 1)[0]
    assert (cut.finish_reason, len(cut.token_ids)) == (FinishReason.LENGTH, 5)


def test_logprobs_bias_and_penalties_go_with_a_grammar(llm: LLM) -> None:
    outputs = StructuredOutputs(regex="[ab]{6}")
    biased = SamplingParams(
        structured_outputs=outputs, logit_bias={65: 100.0, 66: -100.0}, logprobs=2, frequency_penalty=1.0, max_tokens=20
    )
    answer = answers(llm, biased, 1)[0]
    assert re.fullmatch("[ab]{6}", answer.text)
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)


def test_a_row_keeps_nothing_of_the_grammar_before_it(model: Path) -> None:
    with LLM(model, dtype="float32", max_num_seqs=1, num_pages=100) as llm:
        free = SamplingParams(max_tokens=12, temperature=0.0)
        before = llm.generate([[1, 2, 3]], free, use_tqdm=False)[0].outputs[0].token_ids
        assert answers(llm, params(5, choice=("only this",)), 1)[0].text == "only this"
        after = llm.generate([[1, 2, 3]], free, use_tqdm=False)[0].outputs[0].token_ids
        assert after == before
        assert answers(llm, params(6, choice=("or that",)), 1)[0].text == "or that"


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"json": {"type": "nonsense"}}, "Invalid type"),
        ({"json": "{"}, "not JSON"),
        ({"json": '["a"]'}, "must be an object"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"regex": "("}, "invalid regex"),
        ({"regex": r"(?=look)ahead"}, "regex"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": "root ::= 'gbnf'"}, "cannot be used"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "write anyOf, which allows each branch alike"),
        ({"grammar": "start: X\nX: /a/ & /b/"}, "nothing matches"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(llm: LLM, outputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        answers(llm, params(7, **outputs), 1)
    assert caught.value.param == "structured_outputs"
    assert answers(llm, params(8, choice=("still here",)), 1)[0].text == "still here"


def test_a_session_takes_no_grammar(llm: LLM) -> None:
    with llm.session() as session, pytest.raises(InvalidRequest, match="session"):
        session.send("hello", params(9, regex="a"))
