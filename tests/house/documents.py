"""Markdown files of this project, and what stands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.source_tree import ROOT

_FENCE = re.compile(r"(?:<!-- test: (?P<kind>\w+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A fenced piece of a document; `kind` is what its test needs, empty if it is not to be run."""

    document: str
    number: int
    kind: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}-{self.number}-{self.language}"


def documents() -> list[Path]:
    """README, CONTRIBUTING and docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(kind: str | None = None) -> list[Snippet]:
    """All fenced pieces of all documents, or those of one kind."""
    found = [
        Snippet(path.name, number, match["kind"] or "", match["language"], match["text"])
        for path in documents()
        for number, match in enumerate(_FENCE.finditer(path.read_text(encoding="utf-8")), 1)
    ]
    return [snippet for snippet in found if kind is None or snippet.kind == kind]


def commands(program: str) -> Iterator[tuple[Snippet, list[str]]]:
    """The words after `program` in every shell snippet, up to a pipe or a redirection."""
    for snippet in snippets():
        if snippet.language == "sh":
            for line in snippet.text.replace("\\\n", " ").splitlines():
                # What stands in quotes is no pipe.
                for part in re.split(r'[|<>](?=(?:[^"]*"[^"]*")*[^"]*$)', line.split("  #")[0]):
                    # Other programs may have quotes over many lines.
                    if part.split()[:1] == [program]:
                        yield snippet, shlex.split(part.replace("[MODEL] [flags]", ""))[1:]
