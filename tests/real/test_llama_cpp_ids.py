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
    request: pytest.FixtureRequest, vocabularies: Path, tmp_path: Path, model_file: Callable[[str], Path]
) -> Path:
    name: str = request.param
    if name in GOLDEN:
        return vocabularies / f"ggml-vocab-{name}.gguf"
    if name in PUBLISHED:
        stored = json.loads((request.getfixturevalue("published")(name) / "tokenizer.json").read_text())
        return write_bytes_bpe(stored, PUBLISHED[name], tmp_path / "written.gguf")
    return model_file(name)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("vocabulary", ["smollm2", "gemma3-270m", *GOLDEN, *PUBLISHED], indirect=True)
def test_ids_of_random_texts_are_those_of_llama_cpp(
    vocabulary: Path, vocabularies: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    texts = [*hard_texts(vocabularies), *random_texts(rng, COUNT)]
    tokenizer = tokenizer_of(vocabulary)
    ours = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    theirs = ids_of_llama_cpp(vocabulary, texts, tmp_path)
    different = [text for text, own, other in zip(texts, ours, theirs, strict=True) if own != other]
    print(f"{len(different)} of {len(texts)} texts differ")
    for text in different[:8]:
        print(repr(text), [i for i in ours[texts.index(text)]], theirs[texts.index(text)])
    assert not different
