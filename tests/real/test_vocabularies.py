"""Ids of real vocabularies: llama.cpp's own texts and ids, and published tokenizers written to GGUF and back."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.model.vocabulary import mapped_file
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.folder import tokenizer_files, unpack
from tokenmill.model.weights.gguf.pre_tokenizers import PRE_TOKENIZERS
from tokenmill.serving.frontend.tokenizer import Tokenizer as Loaded

GOLDEN = [
    *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"),
    *("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
]
PUBLISHED = {
    "llama3_1": "llama-bpe",
    "qwen3": "qwen2",
    "deepseek_v3": "deepseek-v3",
    "gptoss": "gpt-4o",
    # Phi-4's.
    "gpt35turbo": "dbrx",
    "mistral": "tekken",
}
NORMAL, CONTROL, USER = 1, 3, 4


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_files(open_gguf(path))["tokenizer.json"])


def hard_texts(vocabularies: Path) -> list[str]:
    text = (vocabularies / "ggml-vocab-qwen35.gguf.inp").read_bytes().decode()
    return text.split("\n__ggml_vocab_test__\n")


def random_texts(rng: np.random.Generator, count: int) -> list[str]:
    """Words, numbers, spaces, punctuation and scripts in any order."""
    ranges = ((97, 123), (65, 91), (48, 58), (32, 48), (192, 592), (0x400, 0x4FF), (0x4E00, 0x4F00), (0x900, 0x97F))
    pieces = ["  ", "\n", "\n\n", "\t", " the", "'s", "don't", "1234567", "🦙", "e\u0301", "</s>", "<b>", "\r\n", " = "]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(int(rng.integers(1, 12))):
            low, high = ranges[rng.integers(len(ranges))]
            letters = "".join(map(chr, rng.integers(low, high, rng.integers(1, 6)).tolist()))
            parts.append(pieces[rng.integers(len(pieces))] if rng.random() < 0.4 else letters)
        texts.append("".join(parts))
    return texts


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_are_those_of_llama_cpp(name: str, vocabularies: Path) -> None:
    path = vocabularies / f"ggml-vocab-{name}.gguf"
    tokenizer, file = tokenizer_of(path), open_gguf(path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")[: len(texts)]
    assert len(texts) == len(lines) >= 40
    cut = PRE_TOKENIZERS.get(str(file.metadata.get("tokenizer.ggml.pre")))
    for text, line in zip(texts, lines, strict=True):
        if cut is not None and cut.composes and unicodedata.normalize("NFC", text) != text:
            continue  # the model composes characters, llama.cpp does not
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(number) for number in line.split()], text


@pytest.mark.parametrize("name", GOLDEN)
def test_a_mapped_vocabulary_has_the_ids_of_the_library(
    name: str, vocabularies: Path, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "LEAST_BYTES", 0)
    for file, content in tokenizer_files(open_gguf(vocabularies / f"ggml-vocab-{name}.gguf")).items():
        (tmp_path / file).write_bytes(content)
    library, ours = Loaded.load(tmp_path), Loaded.load(tmp_path, tmp_path / "cache")
    for text in [*hard_texts(vocabularies), *random_texts(rng, 1000)]:
        ids = library.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == library.decode(ids), text


def test_a_grammar_runs_on_gemmas_mapped_vocabulary(
    model_file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpack(model_file("gemma3-270m"), tmp_path / "models")
    monkeypatch.setattr(mapped_file, "build_vocabulary", lambda *_: pytest.fail("it was written with the folder"))
    tokenizer = Loaded.load(folder, tmp_path / "cache")
    own = GrammarTokenizer(str(folder / "tokenizer.json"), tokenizer.vocab_size, (1,), str(tmp_path / "cache"))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    matcher = GrammarCompiler(own).compile(json.dumps({"grammars": [{"json_schema": schema}]}))
    for token_id in tokenizer.encode('{"a": 12}', add_special_tokens=False):
        assert not matcher.is_accepting()
        assert matcher.consume_token(token_id), tokenizer.decode([token_id])
    assert matcher.is_accepting()


def write_bytes_bpe(stored: dict, pre: str, path: Path) -> Path:
    added = {token["content"]: token for token in stored["added_tokens"]}
    places = {**stored["model"]["vocab"], **{text: token["id"] for text, token in added.items()}}
    size = max(places.values()) + 1
    tokens, kinds = [f"[unused {number}]" for number in range(size)], [5] * size
    for text, number in places.items():
        tokens[number] = text
        kinds[number] = NORMAL if text not in added else CONTROL if added[text]["special"] else USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tokenizer_comes_back_from_gguf(
    name: str, published: Callable[[str], Path], vocabularies: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = published(name)
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored = json.loads((folder / "tokenizer.json").read_text())
    ours = tokenizer_of(write_bytes_bpe(stored, PUBLISHED[name], tmp_path / "x.gguf"))
    for text in [*hard_texts(vocabularies), *random_texts(rng, 2000)]:
        want = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == want, text


def test_gemma_3s_file_has_the_ids_of_its_published_tokenizer(
    model_file: Callable[[str], Path], published: Callable[[str], Path], vocabularies: Path, rng: np.random.Generator
) -> None:
    oracle = Tokenizer.from_file(str(published("gemma3") / "tokenizer.json"))
    ours = tokenizer_of(model_file("gemma3-270m"))
    for text in [*hard_texts(vocabularies), *random_texts(rng, 2000)]:
        want = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == want, text
