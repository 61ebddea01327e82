"""The house rules that no linter knows. Each checker is shown a violation first: a rule that cannot fail is no rule."""

import ast
import re
import tokenize
from pathlib import Path

import pytest

from tests.house.source_tree import FOLDERS, ROOT, dotted, files, identifiers, place, tree

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
}
DOORS = {"shell", "allow_pickle", "trust_remote_code"}
MAX_FILE_LINES = 400
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}
MUTABLE_TYPES = {"list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"}


def dangerous(module: ast.Module) -> list[ast.AST]:
    """Imports and calls that can turn bytes into code, and shells."""
    found: list[ast.AST] = []
    for node in ast.walk(module):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [node.module or ""]
            case ast.Call():
                if dotted(node.func) in FORBIDDEN_CALLS:
                    found.append(node)
                found += [node for keyword in node.keywords if _opens_a_door(keyword)]
                continue
            case _:
                continue
        found += [node for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
    return found


def _opens_a_door(keyword: ast.keyword) -> bool:
    is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return keyword.arg in DOORS and not is_off


def mutable_state(module: ast.Module) -> list[ast.AST]:
    """`global` statements, and module-level containers that the module changes."""
    containers = set()
    for statement in module.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_mutable(statement.value):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            containers |= {target.id for target in targets if isinstance(target, ast.Name)}
    return [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Global) or any(_changes(node, name) for name in containers)
    ]


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).split(".")[-1] in MUTABLE_TYPES
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changes(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=method)):
            return owner == name and method in MUTATORS
        case ast.Subscript(value=ast.Name(id=owner), ctx=ast.Store() | ast.Del()):
            return owner == name
        case ast.AugAssign(target=ast.Name(id=owner)):
            return owner == name
    return False


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "exec('1')",
        "import yaml\nyaml.load('x')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "import subprocess\nsubprocess.run('x', shell=True)",
    ],
)
def test_the_check_for_dangerous_code_sees_it(code):
    assert dangerous(ast.parse(code))


def test_nothing_turns_bytes_into_code():
    words = FORBIDDEN_MODULES | {name.rpartition(".")[2] for name in FORBIDDEN_CALLS} | DOORS
    said = re.compile(rf"\b({'|'.join(words)})\b")
    suspects = [path for path in files() if said.search(path.read_text(encoding="utf-8"))]
    found = [place(path, node) for path in suspects for node in dangerous(tree(path))]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "x = 1\ndef f():\n    global x\n    x = 2",
        "cache = {}\ndef f(a):\n    cache[a] = 1",
        "seen: set[int] = set()\ndef f(a):\n    seen.add(a)",
        "from collections import deque\nq = deque()\ndef f():\n    q.append(1)",
        "names = [a for a in 'ab']\ndef f():\n    del names[0]",
        "names = []\ndef f():\n    global names\n    names += [1]",
    ],
)
def test_the_check_for_module_state_sees_it(code):
    assert mutable_state(ast.parse(code))


def test_a_constant_table_is_no_state():
    assert not mutable_state(ast.parse("table = {'a': 1}\ndef f():\n    own = {}\n    own['a'] = table['a']"))


def test_no_module_holds_mutable_state():
    found = [place(path, node) for path in files("src") for node in mutable_state(tree(path))]
    assert found == []


def frozen_dataclasses(module: ast.Module) -> list[ast.AST]:
    """Classes that `dataclass` makes out of source text at each import, though nothing of them ever changes."""
    return [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and dotted(decorator.func).split(".")[-1] == "dataclass"
        and any(one.arg == "frozen" for one in decorator.keywords)
    ]


def test_the_check_for_frozen_dataclasses_sees_them():
    assert frozen_dataclasses(ast.parse("@dataclass(frozen=True, slots=True)\nclass A:\n    a: int"))
    assert not frozen_dataclasses(ast.parse("class A(msgspec.Struct, frozen=True):\n    a: int"))


def test_data_that_does_not_change_is_a_struct():
    """A class costs each process that imports it 0.35 ms as a dataclass, 0.01 as a struct; flags need metadata."""
    found = [path for path in files("src") if frozen_dataclasses(tree(path))]
    assert {str(path.relative_to(ROOT / "src/tokenmill")) for path in found} == {
        "config/configs.py",
        "config/engine_settings.py",
        "config/server_settings.py",
        "config/vision.py",
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_are_small(folder):
    sizes = {path: len(path.read_text().splitlines()) for path in files(folder)}
    large = {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > MAX_FILE_LINES}
    # A file without a function or a class is a table; its length is not complexity.
    assert {name: size for name, size in large.items() if not _is_table(ROOT / name)} == {}


def _is_table(path: Path) -> bool:
    return not any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in tree(path).body)


def calls_it_a_block(name: str) -> bool:
    """Return True if an identifier has the word that vLLM uses for a page."""
    return re.search(r"(^|_)blocks?(_|$)|Block", name) is not None


@pytest.mark.parametrize("name", ["block", "free_blocks", "block_table", "BlockPool"])
def test_the_check_for_blocks_sees_it(name):
    assert calls_it_a_block(name)


@pytest.mark.parametrize("room", ["engine/kv", "engine/runner", "engine/scheduler"])
def test_a_page_is_never_called_a_block(room):
    """Only where pages are dealt with: a block of a kernel, an answer or a wire format is something else."""
    paths = files(f"src/tokenmill/{room}")
    assert paths
    assert [place(path, node) for path in paths for name, node in identifiers(path) if calls_it_a_block(name)] == []


def test_only_the_platform_package_says_torch_cuda():
    found = [
        place(path, node)
        for path in files("src")
        for node in ast.walk(tree(path))
        if dotted(node).startswith("torch.cuda") and "platform" not in path.parts
    ]
    assert found == []


def test_every_package_says_what_it_is_for():
    packages = [path for path in files("src") if path.name == "__init__.py"]
    assert packages
    assert [str(path.relative_to(ROOT)) for path in packages if not ast.get_docstring(tree(path))] == []


def _reads_environment(node: ast.AST) -> bool:
    # `os.environ` as a whole is what a child process is started with; taking a value out of it is reading.
    return (
        dotted(node) in ("os.environ.get", "os.getenv")
        or (isinstance(node, ast.Subscript) and dotted(node.value) == "os.environ")
        or (isinstance(node, ast.Compare) and any(dotted(side) == "os.environ" for side in node.comparators))
    )


def test_configuration_alone_reads_the_environment():
    found = [
        place(path, node)
        for path in files("src")
        for node in ast.walk(tree(path))
        if _reads_environment(node) and not {"cli", "bench"} & {*path.parts}
    ]
    assert found == []


def test_nothing_is_left_to_do():
    found, left = [], re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in files():
        if left.search(path.read_text(encoding="utf-8")):
            with tokenize.open(path) as file:
                for token in tokenize.generate_tokens(file.readline):
                    if token.type == tokenize.COMMENT and left.search(token.string):
                        found.append(f"{path.relative_to(ROOT)}:{token.start[0]}")
    assert found == []
