"""Ids of 10,000 random texts in each real vocabulary, against llama.cpp itself.

It is compiled in an environment of its own, that of benchmarks/peers. Where it departs from a model on purpose, the
model's own tokenizer is right: it does not compose characters, and has one class of letters for all cases and marks.
"""

from __future__ import annotations

import json
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.peers.environments import BUILD

from tests.real.test_vocabularies import GOLDEN, PUBLISHED, hard_texts, random_texts, tokenizer_of, write_bytes_bpe

PYTHON = BUILD / "venvs" / "llama-cpp" / "bin" / "python"
COUNT = 10_000
READ_IDS = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(open(sys.argv[2]))
json.dump([model.tokenize(text.encode(), add_bos=False, special=True) for text in texts], open(sys.argv[3], "w"))
"""


def ids_of_llama_cpp(path: Path, texts: list[str], folder: Path) -> list[list[int]]:
    given, found = folder / "texts.json", folder / "ids.json"
    given.write_text(json.dumps(texts))
    subprocess.run([PYTHON, "-c", READ_IDS, path, given, found], check=True, timeout=600)
    ids: list[list[int]] = json.loads(found.read_text())
    return ids


@pytest.fixture
def vocabulary(
    vocabularies: Path, tmp_path: Path, model_file: Callable[[str], Path], published: Callable[[str], Path]
) -> Callable[[str], Path]:
    """The GGUF file of a vocabulary, by name."""

    def find(name: str) -> Path:
        if name in GOLDEN:
            return vocabularies / f"ggml-vocab-{name}.gguf"
        if name in PUBLISHED:
            stored = json.loads((published(name) / "tokenizer.json").read_text())
            return write_bytes_bpe(stored, PUBLISHED[name], tmp_path / "written.gguf")
        return model_file(name)

    if not PYTHON.exists():
        pytest.skip("llama.cpp is not here: make real")
    return find


def has_marks(text: str) -> bool:
    return any(unicodedata.category(character).startswith("M") for character in text)


def is_not_composed(text: str) -> bool:
    return unicodedata.normalize("NFC", text) != text


def has_case_or_marks(text: str) -> bool:
    return has_marks(text) or any(character.lower() != character.upper() for character in text if ord(character) > 127)


# Texts in which llama.cpp is not the model: it takes off marks that BERT keeps, composes nothing, and knows case in
# ASCII only. There ids are those of the model's own tokenizer.json (test_vocabularies.py).
DEPARTURES: dict[str, Callable[[str], bool]] = {
    "bert-bge": has_marks,
    "qwen2": is_not_composed,
    "qwen35": is_not_composed,
    "qwen3": is_not_composed,
    "gptoss": has_case_or_marks,
    "mistral": has_case_or_marks,
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m", *GOLDEN, *PUBLISHED])
def test_ids_of_random_texts_are_those_of_llama_cpp(
    name: str, vocabulary: Callable[[str], Path], vocabularies: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = vocabulary(name)
    texts = [*hard_texts(vocabularies), *random_texts(rng, COUNT)]
    tokenizer = tokenizer_of(path)
    theirs = ids_of_llama_cpp(path, texts, tmp_path)
    different = [
        text
        for text, ids in zip(texts, theirs, strict=True)
        if tokenizer.encode(text, add_special_tokens=False).ids != ids
    ]
    departs = DEPARTURES.get(name, lambda _: False)
    unlike = [text for text in different if not departs(text)]
    print(f"{name}: {len(different)} of {len(texts)} texts differ, {len(unlike)} where llama.cpp is the model")
    assert not unlike
