"""SGLang's /generate, compared with what /v1/completions says of the same prompts."""

import itertools
import json

import msgspec
import pytest

from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.serving.server.sglang.generate import NativeBody, native_calls

PROMPT = "the quick brown fox"


def generate(server, **body):
    return server.post("/generate", {"text": PROMPT} | body)


def test_one_prompt_gives_one_document(echo_server):
    reply = generate(echo_server, sampling_params={"max_new_tokens": 5}, rid="mine").json()
    same = echo_server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}).json()
    assert reply["text"] == same["choices"][0]["text"]
    assert reply["output_ids"] == same["choices"][0]["token_ids"]
    meta = reply["meta_info"]
    assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 5})
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (same["usage"]["prompt_tokens"], 5)
    assert meta["cached_tokens"] == same["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_list_of_prompts_gives_a_list(echo_server):
    replies = generate(echo_server, text=["ab", "cd"], sampling_params={"max_new_tokens": 2, "n": 2}).json()
    assert len(replies) == 4
    ids = echo_server.post("/tokenize", {"prompt": "cd"}).json()["tokens"]
    by_ids = echo_server.post("/generate", {"input_ids": [ids], "sampling_params": {"max_new_tokens": 2}}).json()
    assert by_ids[0]["text"] == replies[2]["text"]
    single = echo_server.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}).json()
    assert single["text"] == replies[2]["text"]


def test_a_seed_is_taken(echo_server):
    assert generate(echo_server, sampling_params={"max_new_tokens": 2, "sampling_seed": 7}).status_code == 200


def test_a_stop_is_told_with_what_matched(echo_server):
    reply = generate(echo_server, sampling_params={"max_new_tokens": 50, "stop": "brown"}).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "brown"}
    assert reply["text"] == "the quick "
    kept = generate(echo_server, sampling_params={"max_new_tokens": 50, "stop": ["brown"], "no_stop_trim": True})
    assert kept.json()["text"] == "the quick brown"


def test_a_stream_holds_all_of_the_text_so_far(echo_server):
    whole = generate(echo_server, sampling_params={"max_new_tokens": 7}).json()
    lines = generate(echo_server, sampling_params={"max_new_tokens": 7}, stream=True).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    texts = [event["text"] for event in events]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]


def test_log_probabilities_have_sglangs_order(echo_server):
    reply = generate(
        echo_server,
        sampling_params={"max_new_tokens": 3},
        return_logprob=True,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    ).json()
    meta = reply["meta_info"]
    assert [token_id for _, token_id, _ in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(logprob == -0.5 for logprob, _, _ in meta["output_token_logprobs"])
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
    assert meta["output_top_logprobs"][0][1][0] == -9999.0, "JSON has no -inf"


def test_each_prompt_may_have_parameters_of_its_own(echo_server):
    params = [{"max_new_tokens": 3}, {"max_new_tokens": 50, "stop": "brown"}, {"max_new_tokens": 1}]
    replies = generate(echo_server, text=[PROMPT] * 3, sampling_params=params).json()
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == ["length", "stop", "length"]
    for reply, own in zip(replies, params, strict=True):
        assert reply["text"] == generate(echo_server, sampling_params=own).json()["text"]


@pytest.mark.parametrize(
    ("field", "constraint", "ours"),
    [
        ("json_schema", '{"type": "integer"}', {"json": '{"type": "integer"}'}),
        ("regex", "[a-c]+", {"regex": "[a-c]+"}),
        ("ebnf", 'root ::= "a" | "b"', {"grammar": 'root ::= "a" | "b"'}),
    ],
)
def test_what_an_answer_must_match_has_sglangs_names(field, constraint, ours):
    body = msgspec.convert({"text": "x", "sampling_params": {field: constraint}}, NativeBody)
    (call,) = native_calls(body)
    assert call.params["structured_outputs"] == StructuredOutputs(**ours, param="sampling_params")


def test_what_sglangs_clients_send_beside_is_accepted(echo_server):
    harmless = {"lora_path": None, "image_data": None, "logprob_start_len": -1}
    assert generate(echo_server, sampling_params={"max_new_tokens": 2}, **harmless).status_code == 200


def test_its_questions_about_the_server(echo_server):
    info = echo_server.http.get(echo_server.url + "/get_model_info").json()
    assert info == echo_server.http.get(echo_server.url + "/model_info").json()
    assert (info["model_path"], info["is_generation"]) == ("echo", True)
    server_info = echo_server.http.get(echo_server.url + "/get_server_info").json()
    own = echo_server.http.get(echo_server.url + "/server_info").json()
    assert server_info.keys() == own.keys() >= {"version", "settings"}
    assert server_info["max_total_num_tokens"] > 0
    assert len(server_info["internal_states"]) == 1
    assert echo_server.post("/flush_cache").text == "Cache flushed.\n"


def test_mini_sglangs_body_streams_pieces_of_text(echo_server):
    reply = echo_server.post("/generate", {"prompt": "a\nb\r\nc d", "max_tokens": 40, "ignore_eos": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, end = reply.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    lines = [[line.removeprefix("data: ") for line in event.split("\n")] for event in events]
    told = "".join("\n".join(event) for event in lines)
    params = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}
    whole = echo_server.post("/generate", {"text": "a\nb\r\nc d", "sampling_params": params}).json()["text"]
    assert told.replace("\n", "") == whole.replace("\r", "").replace("\n", "")
    assert told.startswith("a\nb"), "a line end within a piece is a line of its event"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "x", "input_ids": [1]},
        {"text": []},
        {"input_ids": []},
        {"input_ids": [1, [2]]},
        {"input_ids": [-1]},
        {"input_ids": [2**31]},
        {"input_ids": [511 + 1]},
        {"text": ["x"] * 257},
        {"text": ["x"] * 200, "sampling_params": {"n": 128}},
        {"text": "x", "sampling_params": {"temperature": -1}},
        {"text": "x", "sampling_params": {"max_tokens": 5}},
        {"text": "x", "sampling_params": {"json_schema": "{}", "regex": "a"}},
        {"text": "x", "sampling_params": [{}]},
        {"text": ["x", "y"], "sampling_params": [{}]},
        {"text": ["x", "y"], "sampling_params": [{"n": 1}, {"n": 2}]},
        {"text": ["x"] * 20, "sampling_params": [{"n": 100}] * 20},
        {"text": "x", "sampling_params": {"logit_bias": {"x": 1}}},
        {"text": "x", "return_logprob": True, "top_logprobs_num": 21},
        {"prompt": "x"},
        {"prompt": "x", "text": "x", "max_tokens": 2},
        {"prompt": "x", "max_tokens": 2, "sampling_params": {}},
        {"text": "x", "max_tokens": 2},
        {"text": "x", "lora_path": "x"},
        {"text": "x", "image_data": "x"},
    ],
)
def test_what_cannot_be_served_is_refused(echo_server, body):
    reply = echo_server.post("/generate", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
