"""Compare the APIs: the same request comes to the same call, and the same message to a text worker."""

import msgspec
import pytest

from tests.serving.server.test_app import make_context
from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.anthropic.body import MessagesBody, message_call
from tokenmill.serving.server.context import ToolParsers
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.openai.chat import ChatBody, chat_call
from tokenmill.serving.server.openai.completions import TextBody, text_call
from tokenmill.serving.server.openai.response_tools import read_tools
from tokenmill.serving.server.openai.responses_body import ResponsesBody, response_call
from tokenmill.serving.server.sglang.generate import NativeBody, native_calls

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA}
CONTEXT = make_context(parsers=ToolParsers("hermes", True, "qwen3"))


def message(read, kind, **fields):
    (message,) = messages_of(read(msgspec.convert(fields, kind)), CONTEXT)
    return message


def a_native_call(body):
    (call,) = native_calls(body)
    return call


@pytest.mark.parametrize("is_named", [False, True])
def test_three_apis_ask_the_same_of_a_chat(is_named):
    asked = {"role": "user", "content": "where?"}
    shared = {"temperature": 0.5, "top_k": 3, "model": "m"}
    chat = message(
        chat_call,
        ChatBody,
        messages=[{"role": "system", "content": "be brief"}, asked],
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice={"type": "function", "function": {"name": "look"}} if is_named else "required",
        parallel_tool_calls=False,
        max_completion_tokens=7,
        max_tokens=9,
        **shared,
    )
    response = message(
        lambda body: response_call(body, read_tools(body.tools), []),
        ResponsesBody,
        instructions="be brief",
        input=[asked],
        tools=[{"type": "function"} | FUNCTION],
        tool_choice={"type": "function", "name": "look"} if is_named else "required",
        parallel_tool_calls=False,
        max_output_tokens=7,
        **shared,
    )
    anthropic = message(
        message_call,
        MessagesBody,
        system=[{"type": "text", "text": "be brief"}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "where?"}]}],
        tools=[{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
        tool_choice={"type": "tool" if is_named else "any", "name": "look", "disable_parallel_tool_use": True},
        max_tokens=7,
        **shared,
    )
    assert chat.calls is not None
    assert (chat.params.max_tokens, chat.reasoning) == (7, "qwen3")
    assert chat == response == anthropic


def test_two_apis_ask_the_same_of_a_text():
    given = {"temperature": 0.0, "logit_bias": {"5": 200.0}, "stop": ["a", "b"], "ignore_eos": True}
    text = message(text_call, TextBody, prompt=[1, 2], max_tokens=5, min_tokens=2, logprobs=3, seed=4, **given)
    renamed = {"max_new_tokens": 5, "min_new_tokens": 2, "sampling_seed": 4}
    native = message(
        a_native_call, NativeBody, input_ids=[1, 2], return_logprob=True, top_logprobs_num=3,
        sampling_params=given | renamed,
    )  # fmt: skip
    assert text.params.logit_bias == {5: 100.0}
    assert text == native


def test_a_call_without_a_length_takes_the_models_own_and_then_the_apis():
    context = make_context()
    assert (
        messages_of(GenerationCall(params={}, prompts=["x"], default_max_tokens=16), context)[0].params.max_tokens == 16
    )
    context.default_sampling["max_tokens"] = 5
    (sent,) = messages_of(GenerationCall(params={}, prompts=["x"], default_max_tokens=16), context)
    assert sent.params.max_tokens == 5


def test_tools_that_may_not_be_called_are_not_shown():
    tools = [{"type": "function", "function": FUNCTION}]
    call = GenerationCall(params={}, messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice="none")
    (sent,) = messages_of(call, CONTEXT)
    assert (sent.tools, sent.calls) == (None, None)


@pytest.mark.parametrize(
    ("read", "kind", "fields", "named"),
    [
        (chat_call, ChatBody, {"messages": [], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (text_call, TextBody, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (
            a_native_call,
            NativeBody,
            {"text": "x", "return_logprob": True, "top_logprobs_num": 21},
            "top_logprobs_num",
        ),
    ],
)
def test_each_api_names_its_own_field(read, kind, fields, named):
    with pytest.raises(InvalidRequest) as refused:
        message(read, kind, **fields)
    assert refused.value.param == named
