"""`LLM.session()` with a real model: turns equal transformers' continuation of all that was said."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoints import greedy_continuation, load_oracle, make_checkpoint
from tests.seeding import seed_for
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidRequest

SEED = seed_for(__name__)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=SEED)


@pytest.fixture
def llm(folder: Path) -> LLM:
    with LLM(folder, dtype="float32", max_num_seqs=4) as engine:
        yield engine
        assert engine.stats().num_pages_pinned == 0
        assert engine.stats().num_rows_used == 0


def test_each_turn_continues_from_all_that_was_said(llm: LLM, folder: Path) -> None:
    oracle, generator, context = load_oracle(folder), random.Random(SEED), []
    with llm.session() as session:
        for _ in range(4):
            turn = [generator.randrange(300) for _ in range(generator.randint(1, 30))]
            output = session.send(turn, GREEDY)
            context = [*context, *turn]
            expected = greedy_continuation(oracle, context, 12)
            assert output.token_ids == expected, f"seed {SEED}"
            assert output.text == llm.get_tokenizer().decode(expected, skip_special_tokens=True)
            context += expected[:-1]  # the last one was never run
    assert llm.stats().prompt_tokens == len(context) - 4 * 11, "only new input counts as prompt"


def test_other_requests_go_on_beside_a_session(llm: LLM) -> None:
    other = llm.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    with llm.session() as session:
        session.send([4, 5], GREEDY)
        session.send([6], GREEDY)
        while not other.finished:
            llm.step()
    alone = llm.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), False)
    assert other.outputs[0].token_ids == alone[0].outputs[0].token_ids


def test_what_cannot_be_served_is_refused_and_the_session_goes_on(llm: LLM) -> None:
    with llm.session() as session:
        for wrong in ([], [10**6], [1] * 600):
            with pytest.raises(InvalidRequest):
                session.send(wrong, GREEDY)
        with pytest.raises(InvalidRequest, match="stop strings"):
            session.send([1], SamplingParams(stop=("x",)))
        assert session.send([1, 2], GREEDY).finish_reason == "length"
        with pytest.raises(InvalidRequest, match="context holds 512"):
            session.send([1] * 500, GREEDY)
        assert session.send("text", GREEDY).token_ids
    with pytest.raises(InvalidRequest, match="closed"):
        session.send([1], GREEDY)


def test_turns_that_are_submitted_while_one_runs_follow_each_other(llm: LLM) -> None:
    inputs = [[1, 2, 3], [4], [5, 6]]
    with llm.session() as session:
        expected = [session.send(one, GREEDY).token_ids for one in inputs]
    with llm.session() as session:
        outputs = [session.submit(one, GREEDY) for one in inputs]
        assert session.send([7], GREEDY).token_ids
    assert [output.token_ids for output in outputs] == expected


def test_a_turn_without_room_ends_with_an_error_and_those_after_it_with_abort(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    session = llm.session()
    outputs = [session.submit(one, long) for one in ([1] * 50, [2] * 80, [3])]
    while outputs[-1].finish_reason is None:
        llm.step()
    assert [output.finish_reason for output in outputs] == ["length", "error", "abort"]
    assert outputs[1].error == "529 tokens with this input; the context holds 512"
    with pytest.raises(InvalidRequest, match="closed"):
        session.submit([4], long)


def test_turns_of_a_session_that_is_closed_early_end_with_abort(llm: LLM) -> None:
    session = llm.session()
    outputs = [session.submit(one, GREEDY) for one in ([1, 2], [3])]
    llm.step()
    session.close()
    assert [output.finish_reason for output in outputs] == ["abort", "abort"]
