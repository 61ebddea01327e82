"""llama.cpp's own routes over HTTP, and LM Studio's list of models; the engine of these servers repeats the prompt."""

import json

import pytest

from tests.eventually import eventually
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig

TEXT = "the mill grinds tokens"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_folder(
        tmp_path_factory.mktemp("models") / "mill",
        byte_level_tokenizer(),
        config={"stub": {}},
        tokenizer_config={"chat_template": TEMPLATE},
    )
    flags = {"override_generation_config": ('{"temperature": 0.25, "top_k": 9}',)}
    with start_server(EngineConfig(model=str(folder)), **flags) as running:
        yield running


def get(server, path):
    return server.http.get(server.url + path)


def completion(server, path="/completion", **fields):
    return server.post(path, {"prompt": TEXT, "ignore_eos": True, "n_predict": 5} | fields)


def num_tokens(server, text):
    return len(server.post("/tokenize", {"content": text}).json()["tokens"])


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion_has_llama_cpps_fields(server, path):
    length = num_tokens(server, TEXT)
    reply = completion(server, path, n_predict=length, return_tokens=True, seed=-1, cache_prompt=True).json()
    assert reply["content"] == TEXT
    assert len(reply["tokens"]) == reply["tokens_predicted"] == reply["tokens_evaluated"] == length
    assert (reply["stop"], reply["stop_type"], reply["model"]) == (True, "limit", "mill")
    assert (reply["generation_settings"]["temperature"], reply["generation_settings"]["top_k"]) == (0.25, 9)
    assert reply["timings"]["predicted_n"] == length


def test_several_prompts_are_a_list_with_counts_of_their_own(server):
    prompts = [TEXT, TEXT + " and more", [5, 6, 7]]
    replies = completion(server, prompt=prompts).json()
    assert [reply["index"] for reply in replies] == [0, 1, 2]
    assert [reply["tokens_evaluated"] for reply in replies] == [*(num_tokens(server, one) for one in prompts[:2]), 3]
    assert {reply["tokens_predicted"] for reply in replies} == {5}


def test_events_join_to_the_whole_and_the_last_says_so(server):
    whole = completion(server).json()
    lines = completion(server, stream=True).text.split("\n\n")
    assert lines.pop() == ""
    *deltas, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(one["content"] for one in deltas) == whole["content"]
    assert not any(one["stop"] for one in deltas)
    assert (last["stop"], last["tokens_predicted"]) == (True, 5)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"n_predict": -3}, "n_predict"),
        ({"logit_bias": [[1, True]]}, "may never come"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "either grammar or json_schema"),
        ({"prompt": [1, "a"]}, "prompt must be"),
        ({"model": "other"}, "does not exist"),
    ],
)
def test_what_cannot_be_is_refused(server, fields, part):
    reply = completion(server, **fields)
    assert reply.status_code in (400, 404)
    assert part in reply.json()["error"]["message"]


def test_biases_may_be_pairs(server):
    (first, *_) = completion(server, return_tokens=True).json()["tokens"]
    assert completion(server, logit_bias=[[first, False], [2, 1.5]]).status_code == 200


def test_tokens_come_in_its_form_where_a_text_does(server):
    text = "mühle <x>"
    plain = server.post("/tokenize", {"content": text}).json()
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert plain == {"tokens": [one["id"] for one in pieces]}
    raw = b"".join(bytes(p) if isinstance(p := one["piece"], list) else p.encode() for one in pieces)
    assert raw.decode() == text
    assert server.post("/detokenize", plain).json() == {"prompt": text, "content": text}
    assert server.post("/tokenize", {"content": "a", "parse_special": False}).status_code == 400
    ours = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert ours["tokens"] == plain["tokens"]


def test_a_chat_becomes_its_prompt(server):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert server.post("/apply-template", chat).json() == {"prompt": "<user>hi<assistant>"}
    bare = chat | {"add_generation_prompt": False}
    assert server.post("/apply-template", bare).json() == {"prompt": "<user>hi"}


def test_the_server_describes_itself(server):
    props = get(server, "/props").json()
    assert (props["model_alias"], props["chat_template"]) == ("mill", TEMPLATE)
    assert props["default_generation_settings"]["params"]["temperature"] == 0.25
    assert props["default_generation_settings"]["n_ctx"] == get(server, "/v1/models").json()["data"][0]["max_model_len"]
    assert len(get(server, "/slots").json()) == props["total_slots"]
    # A test before this one may have left in the middle of an answer.
    eventually(lambda: not any(slot["is_processing"] for slot in get(server, "/slots").json()))
    assert get(server, "/slots?fail_on_no_slot=1").status_code == 200
    (entry,) = get(server, "/models").json()["data"]
    assert (entry["id"], entry["status"]) == ("mill", {"value": "loaded"})
    assert get(server, "/health").json() == {"status": "ok"}


def test_lm_studio_has_its_list_of_models(server):
    (entry,) = get(server, "/api/v0/models").json()["data"]
    assert (entry["id"], entry["type"], entry["state"]) == ("mill", "llm", "loaded")
    assert get(server, "/api/v0/models/mill").json() == entry
    assert get(server, "/api/v0/models/other").status_code == 404
