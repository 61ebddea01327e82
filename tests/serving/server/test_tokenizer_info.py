"""/tokenizer_info: what a client needs that renders chats and counts tokens by itself."""

import json

import jinja2

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tokenmill.serving.server.generation.tokens import tokenizer_info


def test_special_tokens_are_texts_and_paths_stay_here(tmp_path):
    folder = write_folder(tmp_path / "m", byte_level_tokenizer())
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "eos_token": {"__type": "AddedToken", "content": "<end>", "lstrip": False},
        "bos_token": None,
        "vocab_file": "/home/me/vocab",
        "name_or_path": "/home/me",
        "tokenizer_class": "Own",
    }
    path.write_text(json.dumps(config))
    info = tokenizer_info(folder, None)
    assert (info["eos_token"], info["bos_token"], info["tokenizer_class"]) == ("<end>", None, "Own")
    assert "/home" not in json.dumps(info)
    assert info["chat_template"] == config["chat_template"]
    assert tokenizer_info(folder, "{{ messages }}")["chat_template"] == "{{ messages }}"


def test_the_route_says_what_tokenize_does(echo_server):
    """As lm-eval goes about it: the template from here, the tokens from /tokenize."""
    info = echo_server.http.get(echo_server.url + "/tokenizer_info").json()
    messages = [{"role": "user", "content": "hello there"}]
    text = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(info["chat_template"])
    prompt = text.render(messages=messages, add_generation_prompt=True)
    own = echo_server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json()["tokens"]
    assert own == echo_server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert isinstance(info["tokenizer_class"], str)
