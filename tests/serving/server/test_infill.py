"""Gaps over HTTP: /infill in llama.cpp's form, and `suffix` in completions; the engine repeats the prompt."""

import json

import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
GAP = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n\nprint(add(1, 2))"}
BARE = GAP["input_prefix"] + GAP["input_suffix"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(MARKS)
    folder = write_folder(tmp_path_factory.mktemp("models") / "code", tokenizer, config={"stub": {}})
    with start_server(EngineConfig(model=str(folder))) as running:
        yield running


def infill(server, **fields):
    return server.post("/infill", GAP | {"ignore_eos": True, "n_predict": 100} | fields)


def num_tokens(server, text):
    return len(server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"])


def test_the_reply_has_llama_cpps_fields(server):
    length = num_tokens(server, GAP["input_prefix"]) + num_tokens(server, GAP["input_suffix"]) + 3
    reply = infill(server, n_predict=length, return_tokens=True).json()
    assert reply["content"] == BARE
    assert len(reply["tokens"]) == reply["tokens_predicted"] == reply["tokens_evaluated"] == length
    assert (reply["stop"], reply["stop_type"], reply["stopping_word"]) == (True, "limit", "")
    assert reply["generation_settings"]["n_predict"] == length
    assert reply["timings"]["predicted_n"] == length
    assert "tokens" not in infill(server, response_fields=["content"]).json()


def test_a_stop_string_is_named(server):
    reply = infill(server, stop=["("]).json()
    assert (reply["content"], reply["stop_type"], reply["stopping_word"]) == ("def add", "word", "(")


def test_events_join_to_the_whole_and_the_last_says_so(server):
    whole = infill(server, return_tokens=True, n_predict=20).json()
    lines = infill(server, return_tokens=True, n_predict=20, stream=True).text.split("\n\n")
    assert lines.pop() == ""
    *deltas, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(one["content"] for one in deltas) == whole["content"]
    assert [token for one in deltas for token in one["tokens"]] == whole["tokens"]
    assert not any(one["stop"] for one in deltas)
    assert (last["stop"], last["stop_type"], last["tokens_predicted"]) == (True, "limit", 20)


def test_several_fillings_are_a_list(server):
    replies = infill(server, n=2, n_predict=3).json()
    assert [reply["index"] for reply in replies] == [0, 1]
    assert {reply["tokens_predicted"] for reply in replies} == {3}


def test_a_prompt_may_only_be_computed(server):
    """Editors ask so while somebody types, so that the prompt is in the cache when it is needed."""
    reply = infill(server, n_predict=0).json()
    assert (reply["content"], reply["tokens_predicted"], reply["stop_type"]) == ("", 0, "limit")


def test_other_files_stand_before_the_gap(server):
    extra = [{"filename": "a.py", "text": "x = 1\n", "time": 3}]
    reply = infill(server, input_extra=extra, prompt="return").json()
    expected = f"repository\na.py\nx = 1\ncurrent\n{BARE}return"
    assert reply["content"] == (expected * 20)[: len(reply["content"])]
    assert len(reply["content"]) > len(expected)


def test_only_the_picked_fields_are_sent(server):
    picked = infill(server, response_fields=["content", "timings/prompt_n", "nothing/there"]).json()
    assert picked.keys() == {"content", "prompt_n"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_prefix": None}, "input_prefix"), ({"input_suffix": 3}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra"),
        ({"input_extra": [{"text": "a", "filename": 1}]}, "input_extra"),
        ({"input_extra": [{"text": "a", "filename": "b"}] * 300}, "input_extra"), ({"n_predict": -3}, "max_tokens"),
        ({"input_suffix": "x " * 5000}, "prompt"), ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_filled_is_refused_by_name(server, change, param):
    reply = infill(server, **change)
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["param"] == param


def test_a_missing_text_is_refused(server):
    reply = server.post("/infill", {"input_prefix": "a"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input_suffix")


def test_a_suffix_makes_a_gap_of_each_prompt(server):
    body = {"prompt": [GAP["input_prefix"], "b"], "suffix": GAP["input_suffix"], "return_token_ids": True}
    first, second = server.post("/v1/completions", body | {"ignore_eos": True, "max_tokens": 60}).json()["choices"]
    ids = first["prompt_token_ids"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == BARE
    assert len(ids) == num_tokens(server, GAP["input_prefix"]) + num_tokens(server, GAP["input_suffix"]) + 3
    assert first["text"].startswith(BARE)
    assert second["text"].startswith("b" + GAP["input_suffix"])


@pytest.mark.parametrize(
    ("change", "param"), [({"prompt": [5, 6]}, "suffix"), ({"echo": True}, "echo"), ({"suffix": 3}, "suffix")]
)
def test_a_suffix_that_makes_no_gap_is_refused(server, change, param):
    reply = server.post("/v1/completions", {"prompt": "a", "suffix": "b"} | change)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_an_empty_suffix_asks_for_nothing_and_a_model_without_marks_says_so(echo_server):
    empty = echo_server.post("/v1/completions", {"prompt": "ab", "suffix": ""})
    assert empty.json()["choices"][0]["text"].startswith("ab")
    for path, body in (("/v1/completions", {"prompt": "ab", "suffix": "c"}), ("/infill", GAP)):
        refused = echo_server.post(path, body)
        assert refused.status_code == 400
        assert "was not made to fill gaps" in refused.json()["error"]["message"]
