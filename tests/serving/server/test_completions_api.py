import pytest

TEXT = "hello world"


def complete(server, prompt, **fields):
    return server.client.completions.create(model="echo", prompt=prompt, **fields)


def tokens_of(server, text):
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def test_max_tokens_defaults_to_16(echo_server):
    reply = complete(echo_server, TEXT)
    assert reply.usage.completion_tokens == 16
    assert reply.object == "text_completion"


def test_token_ids_are_a_prompt_too(echo_server):
    ids = tokens_of(echo_server, TEXT)
    assert complete(echo_server, ids, max_tokens=len(ids)).choices[0].text == TEXT


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_give_choices_in_order(echo_server, as_ids):
    texts = ["one two", "three", "four five six"]
    prompts = [tokens_of(echo_server, text) for text in texts] if as_ids else texts
    longest = max(len(tokens_of(echo_server, text)) for text in texts)
    reply = complete(echo_server, prompts, n=2, max_tokens=longest)
    assert [choice.index for choice in reply.choices] == list(range(6))
    for i, text in enumerate(texts):
        for choice in reply.choices[2 * i : 2 * i + 2]:
            assert (choice.text + text).startswith(text)
            assert choice.text[: len(text)] == text
    assert reply.usage.prompt_tokens == sum(len(tokens_of(echo_server, text)) for text in texts)
    assert reply.usage.completion_tokens == 6 * longest


def test_a_stream_concatenates_to_the_whole_text(echo_server):
    chunks = list(complete(echo_server, TEXT, max_tokens=30, stream=True))
    whole = complete(echo_server, TEXT, max_tokens=30).choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"


def test_logprobs_are_parallel_lists(echo_server):
    ids = tokens_of(echo_server, TEXT)
    logprobs = complete(echo_server, TEXT, max_tokens=len(ids), logprobs=1).choices[0].logprobs
    assert "".join(logprobs.tokens) == TEXT
    assert logprobs.token_logprobs == [-0.5] * len(ids)
    assert logprobs.top_logprobs == [{token: -0.5} for token in logprobs.tokens]
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(ids))]
    offsets = [
        offset
        for chunk in complete(echo_server, TEXT, max_tokens=len(ids), logprobs=1, stream=True)
        for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == logprobs.text_offset


def test_the_stop_string_may_be_included(echo_server):
    body = {"prompt": TEXT, "stop": ["wor"], "include_stop_str_in_output": True}
    choice = echo_server.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "hello wor"
    assert choice["stop_reason"] == "wor"


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_running(echo_server):
    reply = echo_server.post("/v1/completions", {"prompt": ["fine", ""], "max_tokens": 400})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"
    echo_server.wait_until_unused()


def test_tokenize_and_detokenize_are_inverse(echo_server):
    text = "naïve café 👍🏽 e\u0301"
    reply = echo_server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 512
    assert echo_server.post("/detokenize", {"tokens": reply["tokens"]}).json()["prompt"] == text
