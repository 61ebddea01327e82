"""Check the replies of /v1/chat/completions; the stub engine repeats the prompt, so every text is known."""

import openai
import pytest

HELLO = [{"role": "user", "content": "héllo 👩‍👩‍👧 wörld"}]
PROMPT = "user\nhéllo 👩‍👩‍👧 wörld\nassistant\n"


def chat(server, **fields):
    return server.client.chat.completions.create(model="echo", messages=HELLO, **fields)


def stream(server, **fields):
    return list(chat(server, stream=True, **fields))


def num_prompt_tokens(server) -> int:
    return server.post("/tokenize", {"messages": HELLO}).json()["count"]


def test_a_reply_has_text_usage_and_finish_reason(echo_server):
    num_tokens = num_prompt_tokens(echo_server)
    reply = chat(echo_server, max_tokens=num_tokens)
    assert reply.choices[0].message.content == PROMPT
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.object == "chat.completion"
    assert reply.model == "echo"
    assert reply.system_fingerprint.startswith("fp_")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        num_tokens,
        num_tokens,
        2 * num_tokens,
    )
    assert usage.prompt_tokens_details.cached_tokens == num_tokens // 2


def test_a_stream_concatenates_to_the_whole_reply(echo_server):
    chunks = stream(echo_server, max_tokens=70)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (
        chat(echo_server, max_tokens=70).choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert {(chunk.id, chunk.object, chunk.created) for chunk in chunks} == {
        (chunks[0].id, "chat.completion.chunk", chunks[0].created)
    }


def test_usage_comes_with_the_stream_only_when_asked_for(echo_server):
    assert all(chunk.usage is None for chunk in stream(echo_server, max_tokens=4))
    chunks = stream(echo_server, max_tokens=4, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4


def test_continuous_usage_counts_up(echo_server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in stream(echo_server, max_tokens=5, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize("streamed", [False, True])
def test_n_gives_as_many_choices_in_order(echo_server, streamed):
    if streamed:
        texts = {0: "", 1: "", 2: ""}
        for chunk in stream(echo_server, n=3, max_tokens=9):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        contents = list(texts.values())
    else:
        reply = chat(echo_server, n=3, max_tokens=9)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage.completion_tokens == 27
        assert reply.usage.prompt_tokens == num_prompt_tokens(echo_server)
        contents = [choice.message.content for choice in reply.choices]
    assert len(set(contents)) == 1
    assert PROMPT.startswith(contents[0][:5])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_text_across_token_borders(echo_server, streamed):
    if streamed:
        chunks = stream(echo_server, stop="👧 wör")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        last = chunks[-1].choices[0]
    else:
        last = chat(echo_server, stop=["nothing", "👧 wör"]).choices[0]
        text = last.message.content
    assert text == PROMPT.split("👧 wör", maxsplit=1)[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "👧 wör")
    echo_server.wait_until_unused()


def test_max_tokens_is_capped_by_the_context(echo_server):
    reply = chat(echo_server, max_tokens=100_000)
    assert reply.usage.total_tokens == 512
    assert reply.choices[0].finish_reason == "length"


def test_logprobs_spell_every_token(echo_server):
    num_tokens = num_prompt_tokens(echo_server)
    reply = chat(echo_server, max_tokens=num_tokens, logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert len(content) == num_tokens
    raw = b"".join(bytes(entry.bytes) for entry in content)
    assert raw.decode().replace("<|im_start|>", "").replace("<|im_end|>", "") == PROMPT
    assert [entry.logprob for entry in content[0].top_logprobs] == [-0.5, -9999.0]
    streamed = stream(echo_server, max_tokens=num_tokens, logprobs=True, top_logprobs=2)
    assert [
        e for chunk in streamed for e in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ] == content


def test_without_logprobs_there_are_none(echo_server):
    assert chat(echo_server, max_tokens=2).choices[0].logprobs is None


def test_token_ids_are_returned_when_asked_for(echo_server):
    ids = echo_server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    body = {"messages": HELLO, "max_tokens": 6, "return_token_ids": True}
    assert echo_server.post("/v1/chat/completions", body).json()["choices"][0]["token_ids"] == ids[:6]


def test_the_request_id_of_the_client_is_echoed(echo_server):
    headers = {"X-Request-Id": "my-own-id"}
    reply = echo_server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}, headers=headers)
    assert reply.headers["x-request-id"] == "my-own-id"
    assert reply.json()["id"] == "chatcmpl-my-own-id"
    odd = echo_server.post(
        "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}, headers={"X-Request-Id": "a b"}
    )
    assert odd.headers["x-request-id"] != "a b"


def test_two_calls_with_one_request_id_do_not_mix(echo_server):
    body = {"max_tokens": 14, "request_id": "same"}
    one = {"messages": [{"role": "user", "content": "one"}]} | body
    other = {"messages": [{"role": "user", "content": "other"}]} | body
    texts = [
        echo_server.post("/v1/chat/completions", b).json()["choices"][0]["message"]["content"] for b in (one, other)
    ]
    assert "one" in texts[0]
    assert "other" in texts[1]


def test_text_parts_tools_and_template_variables_reach_the_template(echo_server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
    tokens = echo_server.post("/tokenize", body).json()["tokens"]
    text = echo_server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "user\na\nb\n"


async def consume(client):
    deltas = []
    async for chunk in await client.chat.completions.create(model="echo", messages=HELLO, max_tokens=40, stream=True):
        deltas.append(chunk.choices[0].delta.content or "")
    return "".join(deltas)


def test_many_async_streams_at_once_do_not_mix(echo_server):
    import asyncio

    async def run():
        async with echo_server.async_client as client:
            return await asyncio.gather(*(consume(client) for _ in range(32)))

    texts = asyncio.run(run())
    assert len(set(texts)) == 1
    assert len(texts) == 32


def test_another_model_is_not_found(echo_server):
    with pytest.raises(openai.NotFoundError) as caught:
        echo_server.client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert echo_server.client.models.list().data[0].id == "echo"
    assert echo_server.client.models.retrieve("echo").id == "echo"


def test_a_timeout_ends_the_request(echo_server):
    reply = echo_server.post("/v1/chat/completions", {"messages": HELLO, "timeout": 0.02, "n": 8})
    assert (reply.status_code, reply.json()["error"]["type"]) == (408, "timeout_error")
    echo_server.wait_until_unused()
