"""The generators: seeded, with parts that never overlap, and answers that their own grading accepts."""

from __future__ import annotations

import json
import random

import pytest

NAMES = """
copy reverse count sort arithmetic arithmetic_thinking compare json tool_call tool_answer tool_declined faq
about scope recall story
""".split()  # noqa: SIM905


def samples(name, split, count=200, seed=5):
    """Samples of one skill."""
    from skills import SKILLS

    rng = random.Random(f"{seed}-{name}-{split}")
    return [SKILLS[name](rng, split) for _ in range(count)]


def test_names_are_all_skills():
    from skills import SKILLS

    assert list(SKILLS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_same_samples(name):
    assert samples(name, "train", 50) == samples(name, "train", 50)


@pytest.mark.parametrize("name", NAMES)
def test_heldout_problems_never_occur_in_training(name):
    train = {sample.key for sample in samples(name, "train", 1500)}
    heldout = {sample.key for sample in samples(name, "heldout")}
    assert not train & heldout


@pytest.mark.parametrize("name", NAMES)
def test_the_split_is_a_function_of_the_key(name):
    from skills import split_of

    for sample in samples(name, "heldout", 100):
        assert split_of(sample.key) == "heldout"


def test_every_turn_of_a_training_arithmetic_chat_is_a_training_problem():
    from skills import split_of

    for sample in samples("arithmetic", "train", 300):
        for message in sample.messages:
            if message["role"] == "assistant":
                a, op, b = message["content"].rsplit("So ", 1)[-1].split(" = ")[0].split(" ")
                assert (int(a) < 20 and int(b) < 20) or split_of(f"arithmetic:{a}{op}{b}") == "train"


@pytest.mark.parametrize("name", NAMES)
def test_conversations_end_in_an_answer_and_alternate(name):
    for sample in samples(name, "train", 100):
        roles = [message["role"] for message in sample.messages]
        assert roles[-1] == "assistant" and roles[-2] in ("user", "tool")
        assert "system" not in roles[1:]
        json.dumps(sample.messages), json.dumps(sample.tools)


@pytest.mark.parametrize("name", NAMES)
def test_expected_answers_are_graded_right_and_others_wrong(name):
    from grading import is_right

    for sample in samples(name, "heldout", 30):
        message = sample.messages[-1]
        text = message["content"]
        if "reasoning_content" in message:
            text = f"<think>\n{message['reasoning_content']}\n</think>\n\n{text}"
        for call in message.get("tool_calls", ()):
            text = f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        assert is_right(sample, text, ended=True)
        assert not is_right(sample, text, ended=False)
        assert not is_right(sample, f"{text} and more", ended=True)


def test_arithmetic_answers_and_thoughts_are_correct():
    for name in ("arithmetic", "arithmetic_thinking"):
        for sample in samples(name, "train", 400):
            question, result = sample.messages[-1]["content"].rsplit("So ", 1)[-1].split(" = ")
            a, op, b = question.split(" ")
            right = int(a) + int(b) if op == "+" else int(a) - int(b)
            assert int(result) == right
            assert sample.messages[-1].get("reasoning_content", f"so {right}").splitlines()[-1] == f"so {right}"


def test_a_needed_tool_is_among_the_given_ones_with_all_its_arguments():
    for sample in samples("tool_call", "train", 300):
        call = sample.messages[-1]["tool_calls"][0]["function"]
        tools = {tool["function"]["name"]: tool["function"] for tool in sample.tools}
        assert len(tools) == len(sample.tools)
        assert set(tools[call["name"]]["parameters"]["required"]) == set(call["arguments"])


def test_a_recalled_value_was_told_before():
    for sample in samples("recall", "heldout", 300):
        kind, value = sample.key.split(":")[1:3]
        assert value in sample.messages[-1]["content"], kind
        assert any(value in message["content"] for message in sample.messages[:-1] if message["role"] == "user")


def test_two_tools_on_offer_never_serve_the_same_need():
    from skills.tool_uses import LOOKUPS

    for sample in samples("tool_call", "train", 300):
        descriptions = [tool["function"]["description"] for tool in sample.tools]
        topics = [word for text in descriptions for word in text.split() if word in LOOKUPS]
        assert len(topics) == len(set(topics)), descriptions


def test_what_a_heldout_question_out_of_scope_is_about_is_in_no_training_question():
    about = {sample.key.removeprefix("scope:") for sample in samples("scope", "heldout", 400)}
    assert len(about) > 100
    for sample in samples("scope", "train", 3000):
        assert sample.key.removeprefix("scope:") not in about


def test_json_answers_state_only_what_the_sentence_says():
    for sample in samples("json", "heldout", 300):
        asked = "\n".join(message["content"] for message in sample.messages[:-1]).lower()
        for key, value in json.loads(sample.messages[-1]["content"]).items():
            said = {True: "vegetarian", False: "not vegetarian"}.get(value) if isinstance(value, bool) else str(value)
            assert said is not None and said.lower() in asked
            assert key in asked or len(sample.messages) == 2


def test_no_line_of_a_story_is_outside_the_grammar():
    from skills.stories import is_grammatical

    for sample in samples("story", "train", 100):
        text = sample.messages[-1]["content"]
        assert is_grammatical(text)
        assert not is_grammatical(text + " Then")
        assert not is_grammatical(text.replace("the ", "the the ", 1).replace("lived", "live", 1))


def test_a_story_holds_what_its_request_names():
    for sample in samples("story", "heldout", 200):
        request, text = sample.messages[0]["content"], sample.messages[-1]["content"]
        assert all(word in request and word in text for word in sample.facts["named"])
