"""Anthropic's API with Anthropic's own client, against the stub engine, which repeats the prompt."""

import asyncio
import json

import pytest

from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig

KEY = "the-key"


@pytest.fixture(scope="module")
def server(stub_model):
    parsers = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
    with start_server(EngineConfig(model=str(stub_model)), api_key=(KEY,), **parsers) as running:
        running.http.headers["x-api-key"] = KEY
        yield running


@pytest.fixture
def client(server):
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=30)


def ask(client, **fields):
    fields = {"model": "echo", "max_tokens": 12, "messages": [{"role": "user", "content": "hello there"}]} | fields
    return client.messages.create(**fields)


def rendered(server, messages) -> str:
    """The prompt of a chat as the model gets it, which the stub repeats."""
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_an_answer_is_the_same_as_by_the_other_api(server, client):
    message = ask(client)
    body = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 12}
    chat = server.post("/v1/chat/completions", body, headers={"Authorization": f"Bearer {KEY}"}).json()
    assert [block.text for block in message.content] == [chat["choices"][0]["message"]["content"]]
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "max_tokens")
    assert message.id.startswith("msg_")
    usage = chat["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert message.usage.cache_read_input_tokens == cached
    assert message.usage.input_tokens == usage["prompt_tokens"] - cached
    assert message.usage.output_tokens == 12


def test_a_stream_brings_the_same_message(client):
    fields = {"model": "echo", "max_tokens": 12, "messages": [{"role": "user", "content": "hello there"}]}
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    whole = ask(client)
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.stop_reason == whole.stop_reason
    raw = [event.type for event in ask(client, stream=True)]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(raw[2:-3]) == {"content_block_delta"}
    assert "message_stop" in kinds


def test_asynchronous_clients_too(server):
    import anthropic

    async def run():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, max_tokens=n) for n in (1, 5, 9)))

    assert [message.usage.output_tokens for message in asyncio.run(run())] == [1, 5, 9]


def test_a_stop_sequence_is_named(client):
    message = ask(client, max_tokens=200, stop_sequences=["there"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "there")
    assert message.content[0].text.endswith("hello ")


def test_an_answer_that_the_client_has_begun_is_gone_on_with(server, client):
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well then"}]
    open_ended = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    tokens = server.post("/tokenize", open_ended).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert prompt.rstrip().endswith("well then")
    blocks = [begun[0], {"role": "assistant", "content": [{"type": "text", "text": "well then"}]}]
    for messages in (begun, blocks):
        message = ask(client, messages=messages, max_tokens=len(tokens))
        assert prompt.startswith(message.content[0].text)
        assert client.messages.count_tokens(model="echo", messages=messages).input_tokens == len(tokens)


def test_the_clients_find_the_id_of_their_request(client):
    import anthropic

    assert ask(client)._request_id
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, max_tokens=-1)
    assert refused.value.request_id


def test_system_blocks_and_results_of_tools_reach_the_model(server, client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "let me see"},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a mill"}]},
            {"type": "text", "text": "and now"},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "be brief"}]
    same = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "let me see", "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"at":"it"}'}}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a mill"},
        {"role": "user", "content": "and now"},
    ]  # fmt: skip
    prompt = rendered(server, same)
    message = ask(client, messages=messages, system=system, max_tokens=300)
    assert message.content[0].text[:40].strip()
    assert message.content[0].text in prompt * 9
    counted = client.messages.count_tokens(model="echo", messages=messages, system=system)
    assert counted.input_tokens == len(server.post("/tokenize", {"messages": same}).json()["tokens"])


def test_a_picture_in_a_result_is_refused_as_any_other(server):
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    image = {"type": "image", "source": source}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
    ]
    sentences = []
    for block in (
        image,
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}, image]},
    ):
        messages = [*turns, {"role": "user", "content": [block]}]
        refusal = server.post("/v1/messages", {"model": "echo", "messages": messages, "max_tokens": 3})
        assert refusal.status_code == 400
        sentences.append(refusal.json()["error"]["message"])
    assert len(set(sentences)) == 1
    assert "image" in sentences[0]


TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the mill"}}\n</tool_call>'


def test_a_call_is_a_block_of_its_own_also_in_a_stream(client):
    fields = {"tools": TOOLS, "messages": [{"role": "user", "content": "so " + CALL}], "max_tokens": 70}
    whole = ask(client, **fields)
    kinds = [block.type for block in whole.content]
    assert kinds[:2] == ["text", "tool_use"]
    assert (whole.content[1].name, whole.content[1].input) == ("look", {"at": "the mill"})
    assert whole.content[1].id.startswith("toolu_")
    with client.messages.stream(model="echo", **fields) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == kinds
    assert streamed.content[1].input == {"at": "the mill"}
    assert streamed.content[0].text.strip() == whole.content[0].text.strip()


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "x", "input": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"system": [{"type": "image"}]},
        {"tools": [{"name": "x"}]},
        {"tool_choice": {"type": "tool"}, "tools": [{"name": "x", "input_schema": {"type": "object"}}]},
        {"extra_body": {"temperature": 3}},
        {"extra_body": {"container": "x"}},
        {"max_tokens": 0},
        {"stop_sequences": [""]},
    ],
)
def test_what_cannot_be_answered_is_refused_in_anthropics_form(client, fields):
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["error"]["message"]


def test_errors_have_the_classes_of_the_client(server, client):
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="claude")
    with pytest.raises(anthropic.AuthenticationError):
        ask(anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0))
    reply = server.http.post(f"{server.url}/v1/messages", content=json.dumps({"model": "echo", "what": 1}))
    assert reply.json()["type"] == "error"
