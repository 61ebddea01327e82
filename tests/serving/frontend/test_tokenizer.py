import json

import pytest
from tokenizers import AddedToken, processors

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tokenmill.config.model_files import default_sampling, eos_token_ids
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.serving.frontend.tokenizer import Tokenizer


def load(folder, backend=None, **config) -> Tokenizer:
    write_folder(folder, backend or byte_level_tokenizer())
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def with_bos():
    backend = byte_level_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return backend


def test_encoding_one_or_many_is_the_same(tmp_path):
    tokenizer = load(tmp_path)
    texts = ["hello", "", "naïve 👩‍👩‍👧"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


@pytest.mark.parametrize("backend_adds", [False, True])
@pytest.mark.parametrize("wanted", [None, False, True])
def test_add_bos_token_of_the_config_decides(tmp_path, backend_adds, wanted):
    backend = with_bos() if backend_adds else byte_level_tokenizer()
    config = {"bos_token": "<|endoftext|>"} | ({} if wanted is None else {"add_bos_token": wanted})
    tokenizer = load(tmp_path, backend, **config)
    has_bos = backend_adds if wanted is None else wanted
    assert (tokenizer.encode("a")[0] == 0) == has_bos
    assert tokenizer.encode_batch(["a"]) == [tokenizer.encode("a")]
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 0


def test_truncation_and_padding_in_the_file_are_not_for_us(tmp_path):
    backend = byte_level_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = load(tmp_path, backend)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_special_tokens_are_named_in_either_form(tmp_path):
    tokenizer = load(tmp_path, bos_token={"content": "<|endoftext|>", "lstrip": False}, eos_token="<|im_end|>")
    assert tokenizer.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")


def test_tokens_that_only_the_config_lists_are_added(tmp_path):
    size = byte_level_tokenizer().get_vocab_size()
    listed = {str(size): {"content": "<|new|>", "special": True}, str(size + 5): {"content": "<|gap|>"}}
    tokenizer = load(tmp_path, added_tokens_decoder=listed)
    assert tokenizer.encode("<|new|>") == [size]
    assert tokenizer.decode([size]) == ""
    assert tokenizer.token_id("<|gap|>") is None, "its id would not be the one the model knows"


def test_special_tokens_are_skipped_or_shown(tmp_path):
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken("<keep>", special=False)])
    tokenizer = load(tmp_path, backend)
    ids = tokenizer.encode("<|im_start|>a<keep>")
    assert tokenizer.decode(ids) == "a<keep>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<keep>"


def write_configs(folder, generation=None, config=None):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content))


def test_eos_ids_come_from_the_generation_config_first(tmp_path):
    write_configs(tmp_path, {"eos_token_id": [1, 2]}, {"eos_token_id": 9})
    assert eos_token_ids(tmp_path) == {1, 2}
    write_configs(tmp_path, {"temperature": 1}, {"eos_token_id": 9})
    assert eos_token_ids(tmp_path) == {9}
    write_configs(tmp_path)
    assert eos_token_ids(tmp_path) == frozenset()
    write_configs(tmp_path, {"eos_token_id": ["</s>"]})
    with pytest.raises(InvalidCheckpoint, match=r"generation_config\.json: eos_token_id"):
        eos_token_ids(tmp_path)


def test_default_sampling_parameters_are_those_that_vllm_takes(tmp_path):
    write_configs(tmp_path, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 7})
    assert default_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "max_tokens": 7}


def test_a_model_that_is_not_to_be_sampled_is_greedy(tmp_path):
    write_configs(tmp_path, {"do_sample": False, "temperature": 0.6, "top_p": 0.9})
    assert default_sampling(tmp_path) == {"temperature": 0.0, "top_p": 0.9}


@pytest.mark.parametrize("raw", [b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path, raw):
    (tmp_path / "generation_config.json").write_bytes(raw)
    with pytest.raises(InvalidCheckpoint, match=r"generation_config\.json is not a JSON object"):
        default_sampling(tmp_path)
