"""What the documents name is there: files, folders, classes and functions."""

import ast
import re
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.house.documents import documents
from tests.house.source_tree import FOLDERS, ROOT, files, tree

SOURCE = ROOT / "src" / "tokenmill"
# Where a path of a document may begin.
BASES = (ROOT, SOURCE, ROOT / "docs", ROOT / "native")
CODE_FILE = re.compile(r"[\w./-]+\.(py|cpp|h|pyi|sh)")
FOLDER_OR_FILE = re.compile(r"\w[\w.-]*(/[\w.-]+)*/|\w[\w.-]*(/[\w.-]+)+\.[a-z]+")
CLASS = re.compile(r"([A-Z]\w*[a-z]\w*)((?:\.\w+)*)(\(.*\))?")
# Python's, and vLLM's where a document says how ours differ.
FOREIGN = {"True", "False", "None", "SystemRandom", "StructuredOutputsParams"}
# Written by tools, not kept.
OUTPUTS = ("build/",)


def spans(text: str) -> list[str]:
    """What stands in backquotes in prose and tables."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


@dataclass
class Names:
    """Everything that our code names.

    Attributes:
        all: what Python and C++ define or use, and words of short strings, such as names of architectures.
        members: what a class defines, by the name of the class.
    """

    all: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)


@cache
def names() -> Names:
    """Collect them, once."""
    found = Names()
    for path in files("src", "examples"):
        for top in tree(path).body:
            own = found.members.setdefault(top.name, set()) if isinstance(top, ast.ClassDef) else set()
            for node in ast.walk(top):
                _collect(node, found.all, own)
    for path in (ROOT / "native").rglob("*.[hc]*"):
        found.all.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return found


def _collect(node: ast.AST, words: set[str], own: set[str]) -> None:
    match node:
        case ast.Constant(value=str() as text) if len(text) < 200:
            words.update(re.findall(r"\w+", text))
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            words.add(node.name)
            own.add(node.name)
        case ast.Name():
            words.add(node.id)
            if isinstance(node.ctx, ast.Store):
                own.add(node.id)
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            own.add(node.attr)


def faults(text: str) -> list[str]:
    """The names in a text that are not there."""
    return [span for span in spans(text) if not exists(span)]


def exists(span: str) -> bool:
    """True for what is there, and for what is neither a path nor a name of a class."""
    path = re.sub(r":\d+$", "", span)
    if "NAME" in path or path.startswith(OUTPUTS):
        return True
    if FOLDER_OR_FILE.fullmatch(path):
        return any((base / path).exists() for base in BASES)
    if CODE_FILE.fullmatch(path):
        return any(path == known.name for known in code_files())
    found = CLASS.fullmatch(span)
    if found is None or found[1] in FOREIGN:
        return True
    inner = found[2].strip(".").partition(".")[0]
    known = names()
    return inner in known.members[found[1]] if inner and found[1] in known.members else found[1] in known.all


@cache
def code_files() -> tuple[Path, ...]:
    """Python, C++ and shell files of the repository."""
    native = [path for path in (ROOT / "native").rglob("*") if path.suffix in (".h", ".cpp")]
    return (*files(*FOLDERS), *files("tools"), *native, *(ROOT / "tools").glob("*.sh"), *SOURCE.glob("*.pyi"))


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_what_a_document_names_is_there(path):
    assert not faults(path.read_text(encoding="utf-8"))


def test_a_stale_name_is_found():
    text = (
        "`engine/scheduler/step_pass.py`, `step_pass.py`, `Books.retire`, `Scheduler.retire`, `engine/loops/`, `Shelf`"
    )
    assert faults(text) == re.findall(r"`([^`]+)`", text)


def test_names_that_are_there_pass():
    text = "`engine/loop/engine.py:230`, `engine.py`, `Engine.step`, `engine/loop/`, `src/tokenmill/`, `Sampler(...)`"
    assert not faults(text)


def test_the_step_log_is_described_whole():
    from typing import get_args

    from tokenmill.core.plan import StepPlan
    from tokenmill.engine.loop.step_log import LogHeader, RecordedInput, StepRecord

    described = set(spans((ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8")))
    recorded = {one.encode_name for one in msgspec.structs.fields(StepRecord)} | set(LogHeader.__struct_fields__)
    events = {kind.__name__ for kind in get_args(RecordedInput)}
    assert recorded | events | {one.name for one in fields(StepPlan)} <= described
