import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.frontend.tokenizers_for_tests import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    word_piece_tokenizer,
    word_tokenizer,
    wrapped,
)
from tests.tiers import scaled
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.vocabulary.byte_level import byte_of_character
from tokenmill.serving.frontend.decoders import build_stages
from tokenmill.serving.frontend.tokenizer import IncrementalDetokenizer, Tokenizer


def wrap(backend) -> Tokenizer:
    return wrapped(backend)


TOKENIZERS = {
    "byte_level": wrap(byte_level_tokenizer()),
    "byte_fallback": wrap(byte_fallback_tokenizer()),
    "metaspace": wrap(metaspace_tokenizer()),
    "words": wrap(word_tokenizer()),
    "word_pieces": wrap(word_piece_tokenizer()),
}


def chunks_of(ids: list[int], cuts: list[int]):
    begin = 0
    for size in cuts:
        yield ids[begin : begin + size]
        begin += size
    yield ids[begin:]


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return "".join(map(detokenizer.push, chunks_of(ids, cuts))) + detokenizer.finish()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=scaled(100), deadline=None)
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(0, 4), max_size=30))
def test_deltas_of_any_ids_concatenate_to_the_full_decode(name, data, skip, cuts):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    assert stream(tokenizer, ids, cuts, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=scaled(80), deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 3), max_size=60))
def test_deltas_of_any_text_concatenate_to_the_full_decode(name, text, cuts):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert stream(tokenizer, ids, cuts) == tokenizer.decode(ids)


@settings(max_examples=scaled(100), deadline=None)
@given(raw=st.binary(max_size=24), cuts=st.lists(st.integers(0, 3), max_size=24))
def test_invalid_bytes_become_the_replacement_characters_of_the_full_decode(raw, cuts):
    byte_level = {byte: character for character, byte in byte_of_character().items()}
    spellings = {"byte_fallback": [f"<0x{byte:02X}>" for byte in range(256)], "byte_level": byte_level}
    for name, spelling in spellings.items():
        tokenizer = TOKENIZERS[name]
        ids = [tokenizer.token_id(spelling[byte]) for byte in raw]
        assert stream(tokenizer, ids, cuts) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "👍🏽", "e\u0301", "नमस्ते", "你好", "\x00\x7f", " a  b ", "\ufffd"])
def test_no_delta_shows_half_a_character(text):
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text)]
    assert "".join(deltas) + detokenizer.finish() == text
    assert text.startswith(deltas[0])


def test_complete_characters_are_shown_at_once():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    for character in "hello world":
        assert detokenizer.push(tokenizer.encode(character)) == character


def test_a_token_of_a_split_character_spells_its_bytes():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1, "the test needs a character of several tokens"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🦊".encode()


def test_each_id_is_looked_at_once(monkeypatch):
    tokenizer = TOKENIZERS["byte_level"]
    looked_at = []
    visible_tokens = tokenizer.visible_tokens
    monkeypatch.setattr(
        tokenizer, "visible_tokens", lambda ids, skip: looked_at.extend(ids) or visible_tokens(ids, skip)
    )
    ids = [random.randrange(tokenizer.vocab_size) for _ in range(2000)]
    assert stream(tokenizer, ids, [1] * 2000) == tokenizer.decode(ids)
    assert looked_at == ids


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "CTC"},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}]},
    ],
)
def test_a_decoder_that_cannot_stream_is_refused_by_name(decoder):
    kind = decoder.get("decoders", [decoder])[0]["type"]
    with pytest.raises(InvalidCheckpoint, match=f"some/tokenizer.json.*{kind}"):
        build_stages(decoder, "some/tokenizer.json")
