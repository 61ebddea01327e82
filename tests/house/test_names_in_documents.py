"""Documents name files, folders and classes that exist."""

import ast
import re
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
NO_CODE = re.compile(r'""".*?"""|(#|//)[^\n]*', re.DOTALL)
# Written by tools, not kept.
OUTPUTS = ("build/",)


def spans(text: str) -> list[str]:
    """Return the code spans of prose and tables."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


@cache
def sources() -> dict[Path, str]:
    """Return our code without docstrings and comments, which may be stale themselves."""
    paths = [*files("src", "examples"), *(ROOT / "native").rglob("*.h"), *(ROOT / "native").rglob("*.cpp")]
    return {path: NO_CODE.sub("", path.read_text(encoding="utf-8")) for path in paths}


@cache
def words() -> frozenset[str]:
    """Return every word of our code, with those of strings, such as names of architectures."""
    return frozenset(word for text in sources().values() for word in re.findall(r"\w+", text))


@cache
def members(name: str) -> frozenset[str] | None:
    """Return the names that our classes of this name define; None: no class has it."""
    own = [path for path, text in sources().items() if re.search(rf"^class {name}\b", text, re.MULTILINE)]
    classes = [one for path in own for one in tree(path).body if isinstance(one, ast.ClassDef) and one.name == name]
    found = {word for one in classes for node in ast.walk(one) for word in _defined(node)}
    return frozenset(found) if classes else None


def _defined(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            return [node.attr]
    return []


def faults(text: str) -> list[str]:
    """Return the names in a text that do not exist."""
    return [span for span in spans(text) if not exists(span)]


def exists(span: str) -> bool:
    """Return False for a path or a name of a class that does not exist."""
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
    own = members(found[1]) if inner else None
    return found[1] in words() if own is None else inner in own


@cache
def code_files() -> tuple[Path, ...]:
    """Return the Python, C++ and shell files of the repository."""
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
    assert recorded | events | set(StepPlan.__struct_fields__) <= described
