"""The bundled folders: an ordinary Hugging Face checkpoint with our tokenizer, template and card."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from tokenmill.demo import demo_model_path, draft_model_path, smollm2_head_path

FOLDERS = [pytest.param(demo_model_path, 25, id="model"), pytest.param(draft_model_path, 3, id="draft")]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))


@pytest.mark.parametrize(("folder", "megabytes"), FOLDERS)
def test_folder_is_complete_and_small(folder, megabytes):
    files = {path.name: path.stat().st_size for path in folder().iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "README.md",
    } <= set(files)
    assert sum(files.values()) < megabytes * 1e6


@pytest.mark.parametrize(("folder", "megabytes"), FOLDERS)
def test_config_is_a_qwen3_that_fits_its_tensors(folder, megabytes):
    config = json.loads((folder() / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 2048 and config["torch_dtype"] == "bfloat16"
    with safe_open(folder() / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
        embedding = tensors.get_slice("model.embed_tokens.weight").get_shape()
    assert embedding == [config["vocab_size"], config["hidden_size"]]


def test_both_models_share_the_tokenizer():
    first, second = demo_model_path(), draft_model_path()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_vocabulary_fills_the_embedding(tokenizer):
    config = json.loads((demo_model_path() / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 2560


def test_digits_are_always_single_tokens(tokenizer):
    for text in ("1234567890", "127+345?", '{"age": 42}', " 99 bottles", "x7y10z"):
        tokens = tokenizer.encode(text).tokens
        assert [t for t in tokens if any(c.isdigit() for c in t)] == [c for c in text if c.isdigit()]


def test_capital_letters_of_a_run_are_single_tokens(tokenizer):
    assert tokenizer.encode("QXBTR").tokens == list("QXBTR")


@pytest.mark.parametrize("word", ["Mirakeli", "compass", "xyruped"])
def test_a_word_has_the_same_tokens_wherever_it_stands(tokenizer, word):
    alone = tokenizer.encode(word).ids
    for text in (f"I am {word}.", f'"{word}"', f"({word})", f"x\n{word}"):
        ids = tokenizer.encode(text).ids
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids)))


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "Grüße, señor",
        "日本語 😀👩‍👩‍👧",
        "tabs\tand\r\nlines\n\n",
        "  spaces   ",
        '{"a": [1, -2.5]}',
        "İ§€",
    ],
)
def test_any_text_comes_back(tokenizer, text):
    import unicodedata

    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_special_tokens_are_one_id_each(tokenizer):
    for token in SPECIAL:
        assert len(tokenizer.encode(token).ids) == 1


def test_replies_end_at_the_configured_token(tokenizer):
    for folder in (demo_model_path(), draft_model_path()):
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert tokenizer.token_to_id("<|im_end|>") in ends and tokenizer.token_to_id("<|endoftext|>") in ends


def test_card_has_a_measured_table():
    card = (demo_model_path() / "README.md").read_text()
    assert "| skill | right | of | accuracy |" in card
    for skill in ("copying", "counting", "JSON", "tool calls", "FAQ", "arithmetic", "recall"):
        assert f"| {skill} |" in card


def test_the_head_is_small_and_has_the_sizes_of_smollm2():
    folder = smollm2_head_path()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12e6
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (576, 49152, 1)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert tensors.get_slice("lm_head.weight").get_shape() == [config["draft_vocab_size"], 576]
        assert tensors.get_slice("fc.weight").get_shape() == [576, 3 * 576]
