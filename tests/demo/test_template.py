"""The chat template, rendered as transformers renders it."""

from __future__ import annotations

import json

import pytest

from tokenmill.core.errors import InvalidRequest
from tokenmill.demo import demo_model_path
from tokenmill.serving.frontend.chat_template import load_chat_template

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}


@pytest.fixture(scope="module")
def render():
    from data import Template

    config = json.loads((demo_model_path() / "tokenizer_config.json").read_text())
    template = Template(config["chat_template"])
    return template.render


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def test_one_question(render):
    text = render([user("Hi")], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_system_comes_first(render):
    text = render([{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello")])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
    )


def test_content_parts_are_joined(render):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render([user(parts)]) == "<|im_start|>user\nab<|im_end|>\n"


def test_tools_are_listed_in_the_system_turn(render):
    text = render([user("Weather?")], [TOOL], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou can call these tools:\n<tools>\n")
    line = next(line for line in text.splitlines() if line.startswith('{"name": "get_weather"'))
    assert json.loads(line)["parameters"] == {"city": {"type": "string"}}


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_calls_and_results(render, arguments):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        user("?"),
        assistant(None, tool_calls=[call]),
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = render(messages, [TOOL], add_generation_prompt=True)
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    ) in text


def test_two_calls_of_one_turn_are_on_lines_of_their_own(render):
    text = render([user("?"), assistant("", tool_calls=[CALL, CALL])], [TOOL])
    assert "</tool_call>\n<tool_call>" in text


def test_thinking_switches(render):
    plain = render([user("1+1?")], add_generation_prompt=True)
    on = render([user("1+1?")], add_generation_prompt=True, enable_thinking=True)
    off = render([user("1+1?")], add_generation_prompt=True, enable_thinking=False)
    assert on == "<|im_start|>system\nThink before you answer.<|im_end|>\n" + plain
    assert off == plain + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_is_rendered_in_the_last_turn_and_dropped_from_history(render, name):
    last = render([user("1+1?"), assistant("2", **{name: "one more"})])
    assert last.endswith("<|im_start|>assistant\n<think>\none more\n</think>\n\n2<|im_end|>\n")
    history = render([user("1+1?"), assistant("2", **{name: "one more"}), user("thanks")])
    assert "<think>" not in history


def test_a_thought_inside_the_content_is_split_off(render):
    history = render([user("1+1?"), assistant("<think>\nhm\n</think>\n\n2"), user("thanks")])
    assert "hm" not in history and "<|im_start|>assistant\n2<|im_end|>" in history


def test_transformers_renders_the_same():
    transformers = pytest.importorskip("transformers")
    import random

    from data import Encoder
    from skills import SKILLS

    encoder = Encoder(demo_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    for name, generate in SKILLS.items():
        sample = generate(random.Random(name), "heldout")
        flags = {} if sample.thinking is None else {"enable_thinking": sample.thinking}
        theirs = tokenizer.apply_chat_template(
            list(sample.messages), tools=list(sample.tools) or None, tokenize=False, **flags
        )
        assert theirs == encoder.text(sample)
        assert tokenizer(theirs, add_special_tokens=False)["input_ids"] == encoder.tokenizer.encode(theirs).ids


def test_loss_falls_on_the_answers_only():
    import random

    from data import Encoder
    from skills import SKILLS

    encoder = Encoder(demo_model_path())
    for name in ("recall", "tool_answer", "arithmetic_thinking", "faq"):
        sample = SKILLS[name](random.Random(1), "train")
        row = encoder.rows([sample])[0]
        said = encoder.tokenizer.decode(row.ids[row.mask].tolist(), skip_special_tokens=False)
        assert said.count("<|im_end|>") == sum(m["role"] == "assistant" for m in sample.messages)
        assert "<|im_start|>" not in said and said.endswith(sample.messages[-1]["content"] + "<|im_end|>")


@pytest.mark.parametrize("model", ["model", "draft"])
def test_a_role_that_does_not_exist_is_refused_not_dropped(model):
    folder = demo_model_path().parent / model
    template = load_chat_template(folder, {})
    assert template is not None
    with pytest.raises(InvalidRequest, match='there is no role "alien"'):
        template.render([user("Hi"), {"role": "alien", "content": "Hello"}])
    assert "Hi" in template.render([user("Hi")])
