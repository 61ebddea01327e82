"""Grammars over a mapped vocabulary against the same over its tokenizer.json: bytes, special tokens, masks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving.frontend.random_tokenizers import random_file
from tests.tiers import scaled
from tokenmill.core.errors import InvalidRequest
from tokenmill.demo import demo_model_path
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.model.structured.mapped_tokens import MappedTokens, mapped_tokens
from tokenmill.model.vocabulary import mapped_file

pytest.importorskip("tokenmill._native")

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["ab", "é"]}}, "required": ["a", "b"]}
GRAMMARS = [
    json.dumps({"grammars": [{"json_schema": SCHEMA}]}),
    json.dumps({"grammars": [{"lark_grammar": "start: TEXT <[3]> TEXT\nTEXT: /(?s:.*)/"}]}),
    json.dumps({"grammars": [{"lark_grammar": 'start: /[ab\\n ]+/ "é!"'}]}),
]


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "LEAST_BYTES", 0)


def pair(folder: Path, cache: Path, size: int) -> tuple[GrammarCompiler, GrammarCompiler]:
    own = GrammarTokenizer(str(folder / "tokenizer.json"), size, (1,))
    return GrammarCompiler(own), GrammarCompiler(GrammarTokenizer(own.path, size, (1,), str(cache)))


def assert_equal_masks(rng: np.random.Generator, read: Any, mapped: Any) -> None:
    """Draw tokens from the masks of two matchers, which must not differ."""
    for _ in range(30):
        bits = mapped.compute_bitmask()
        assert bits == read.compute_bitmask()
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little"))
        if mapped.is_stopped() or not len(allowed):
            break
        token = int(rng.choice(allowed))
        assert mapped.consume_token(token) == read.consume_token(token)


def check(rng: np.random.Generator, folder: Path, cache: Path, size: int) -> bool:
    """Compare both readings of a tokenizer; return False if there is one alone."""
    read, mapped = pair(folder, cache, size)
    try:
        read.load()
    except InvalidRequest:
        return False
    tokens = mapped_tokens(folder / "tokenizer.json", cache, size, 1)
    if tokens is None:
        return False
    ours, theirs = mapped._backend, read._backend
    for number, token in enumerate(tokens.tokens):
        shown = theirs.decode_bytes([number])
        # Characters outside GPT-2's table, which llguidance has no bytes for, and a text has.
        is_unread = shown == f"<[{number}]>".encode()
        assert is_unread or ours.decode_bytes([number]) == shown
        assert is_unread or ours.is_special_token(number) == theirs.is_special_token(number)
        assert token or is_unread, "past the vocabulary are no texts"
    for grammar in GRAMMARS:
        try:
            matcher = read.compile(grammar)
        except InvalidRequest:
            continue
        assert_equal_masks(rng, matcher.deep_copy(), mapped.compile(grammar).deep_copy())
    return True


def test_the_demos_tokens_are_the_same(rng: np.random.Generator, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    shutil.copy(demo_model_path() / "tokenizer.json", folder)
    assert check(rng, folder, tmp_path / "cache", 2600)
    read, mapped = pair(folder, tmp_path / "cache", 2600)
    text = '{"a": "Zürich 你 ab", "b": '
    assert mapped._backend.tokenize_str(text) == read._backend.tokenize_str(text)


def test_so_are_those_of_random_tokenizers(rng: np.random.Generator, tmp_path: Path) -> None:
    num_compared = 0
    for number in range(scaled(60)):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = random_file(rng)
        if not _is_byte_level(file) and "ByteLevel" in json.dumps(file["pre_tokenizer"]):
            continue  # letters for bytes, and a vocabulary without them: no text comes back from such a file
        file["decoder"] = {"type": "ByteLevel"} if _is_byte_level(file) else _FALLBACK
        file["model"]["vocab"].setdefault("|end|", len(file["model"]["vocab"]))
        (folder / "tokenizer.json").write_text(json.dumps(file))
        num_compared += check(rng, folder, tmp_path / "cache", 1200)
    assert num_compared > 0


_FALLBACK = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def _is_byte_level(file: dict[str, Any]) -> bool:
    return "Ġ" in file["model"]["vocab"]


def test_a_text_is_encoded_as_the_middle_of_one(tmp_path: Path) -> None:
    # A prefix that begins every text would be a space too many between the texts that a grammar forces.
    letters = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "▁a": 4}
    file = {
        "model": {"type": "BPE", "vocab": letters, "merges": [["▁", "a"]], "unk_token": "<unk>", "byte_fallback": True},
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": _FALLBACK,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    tokens = mapped_tokens(tmp_path / "tokenizer.json", tmp_path / "cache", 5, 1)
    assert isinstance(tokens, MappedTokens)
    assert (tokens("a"), tokens(b" a"), tokens("aa")) == ([3], [4], [3, 3])
    assert tokens.tokens == [b"<unk>", b"</s>", b" ", b"a", b" a"]
