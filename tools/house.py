"""Print the facts of the house's structure, each beside where it should be; 1 if one that was reached has been lost.

Rooms are the folders below `src/tokenmill`: a wing without folders of its own, such as `core`, or a folder of one that
has them, such as `engine/kv`. Imports count wherever they stand, in functions and for type checkers too. Reads files
only: nothing of the project is imported.

    python tools/house.py
"""

from __future__ import annotations

import ast
import gc
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
SOURCE = TOP / "src" / "tokenmill"
# Modules that are addresses: users write them.
ADDRESSES = {"__init__", "__main__", "plugins", "ray", "scheduling", "testing"}
CAPABILITIES = {
    "adapters", "encoder", "states", "transfers", "windows", "drafter", "_drafter", "vision", "draft",
    "_adapters", "_encoder", "_states", "_transfers", "_windows", "drafters", "_drafters", "groups", "depth",
}  # fmt: skip
FAMILIES = "model.models.families"
LONGEST_FUNCTION, LONGEST_CLASS, CRUMB = 50, 300, 60
# A docstring, of an attribute too, that names a thing by a clause instead of saying what the code does.
CLAUSES = "What(ever)?|Who(ever)?|Whose|Where|Which|Whether|Why|That which|Those (that|who)|How|Nobody|There (is|are)"
NOUN_CLAUSE = re.compile(f'^ *r?"""({CLAUSES}) ', re.MULTILINE)
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")


@dataclass(frozen=True)
class Fact:
    """One number of the house.

    Attributes:
        most: where it should be, at most.
        is_reached: it has been there, and must stay.
    """

    name: str
    value: int
    most: int
    is_reached: bool = True

    @property
    def is_lost(self) -> bool:
        """True where it was better before."""
        return self.is_reached and self.value > self.most


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by its dotted name below `tokenmill`; "" is the package itself."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found[name.removesuffix("__init__").removesuffix(".")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@cache
def wings_with_rooms() -> frozenset[str]:
    """Return the wings that have folders with modules of their own."""
    return frozenset(path.parent.parent.name for path in SOURCE.glob("*/*/__init__.py"))


def room_of(module: str) -> str:
    """Return the room that a module stands in; "" for the loose ones at the top."""
    wing, _, rest = module.partition(".")
    if not (SOURCE / wing).is_dir() or not wing:
        return ""
    inner = rest.partition(".")[0]
    has_folder = wing in wings_with_rooms() and inner and (SOURCE / wing / inner).is_dir()
    return f"{wing}/{inner}" if has_folder else wing


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return which modules each module imports, of ours and of others; of those the first name behind a colon."""
    known = trees()
    found: dict[str, set[str]] = defaultdict(set)
    for module, tree in known.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name.removeprefix("tokenmill.") in known else node.module for name in inner]
            else:
                continue
            for name in names:
                is_ours = name.startswith("tokenmill.")
                found[module].add(name.removeprefix("tokenmill.") if is_ours else ":" + name.partition(".")[0])
    return {module: frozenset(names) for module, names in found.items()}


def circles(arrows: dict[str, set[str]]) -> set[str]:
    """Return who can be reached from themselves."""
    reached: set[str] = set()
    for start, own in arrows.items():
        seen, left = set[str](), list(own)
        while left:
            one = left.pop()
            if one not in seen:
                seen.add(one)
                left += arrows.get(one, ())
        if start in seen:
            reached.add(start)
    return reached


def arrows_between(place: dict[str, str]) -> dict[str, set[str]]:
    """Return which places import which others, by the place of each module."""
    arrows: dict[str, set[str]] = {one: set() for one in place.values() if one}
    for module, names in imports().items():
        for name in names:
            begin, end = place.get(module, ""), place.get(name, "")
            if begin and end and begin != end:
                arrows[begin].add(end)
    return arrows


def facts() -> Iterator[Fact]:
    """Measure all of them."""
    rooms = {module: room_of(module) for module in trees()}
    yield Fact("wings in circles", len(circles(arrows_between({m: r.partition("/")[0] for m, r in rooms.items()}))), 0)
    yield Fact("rooms in circles", len(circles(arrows_between(rooms))), 0)
    modules = {module: module for module in trees() if module}
    yield Fact("modules in circles", len(circles(arrows_between(modules))), 0)
    yield from facts_of_contracts({room for room in rooms.values() if room})
    yield Fact("wings", len({room.partition("/")[0] for room in rooms.values() if room}), 12)
    yield Fact("rooms below wings", len({room for room in rooms.values() if "/" in room}), 37)
    loose = {module for module in trees() if "." not in module and not (SOURCE / module).is_dir()}
    yield Fact("loose modules besides addresses", len(loose - ADDRESSES), 0)
    yield from facts_of_the_core()
    yield from facts_of_sizes()


def facts_of_contracts(rooms: set[str]) -> Iterator[Fact]:
    """Measure the import contracts of pyproject.toml."""
    contracts = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    law = next(one for one in contracts if one["type"] == "layers")
    named = {name.strip() for layer in law["layers"] for name in layer.replace(":", "|").split("|")}
    homes = {f"tokenmill.{room.replace('/', '.')}" for room in rooms if (SOURCE / room / "__init__.py").exists()}
    # A wing that has rooms may hold nothing else: its own modules would have no place.
    yield Fact("rooms without a place in the law of imports", len(homes - named - holders(homes)), 0)
    yield Fact("import contracts", len(contracts), 6)
    yield Fact("exceptions from contracts", sum(len(one.get("ignore_imports", ())) for one in contracts), 6)


def holders(homes: set[str]) -> set[str]:
    """Return the wings that only hold rooms."""
    outer = {home.rpartition(".")[0] for home in homes if home.count(".") == 2}
    return {home for home in outer if not [m for m in trees() if room_of(m) == home.partition(".")[2] and "." in m]}


def facts_of_the_core() -> Iterator[Fact]:
    """Measure how far capabilities are threaded through scheduler, engine and runner by hand."""
    scheduler = [tree for module, tree in trees().items() if module.startswith("engine.scheduler")]
    yield Fact("questions for a capability in scheduler/", sum(map(num_questions, scheduler)), 0)
    yield Fact("kinds of resources that the scheduler's passes know", len(kinds_known_by_passes()), 0)
    connectors = sum(
        isinstance(node, ast.Attribute) and node.attr == "_connector"
        for node in ast.walk(trees()["engine.loop.engine"])
    )
    yield Fact("mentions of the KV connector in the engine", connectors, 0)
    capabilities = {"engine/transfer", "engine/speculation", "model/adapters", "model/structured", "model/vision"}
    for module in ("engine", "control"):
        yield Fact(f"capabilities that the {module} knows", len(known_by(f"engine.loop.{module}") & capabilities), 0)
    state = ast.unparse(trees()["engine.runner.row_state"])
    yield Fact("questions in row_state", state.count(" is None") + state.count(" is not None"), 0)
    allowed = {"core", "config", "engine/kv", "engine/scheduler"}
    yield Fact("rooms that scheduler/ should not know", len(known_by("engine.scheduler") - allowed), 0)
    runner = known_by("engine.runner") & {"model/adapters", "model/vision"}
    yield Fact("capabilities that runner/ knows", len(runner), 0)
    with_torch = [m for m in trees() if m.startswith("engine.loop") and ":torch" in imports().get(m, ())]
    yield Fact("modules of the loop with torch", len(with_torch), 0)
    outside = {name for module, own in imports().items() if not module.startswith(FAMILIES) for name in own}
    families = [name for name in outside if name.startswith(f"{FAMILIES}.")]
    yield Fact("families that are known outside of their room", len(families), 0)
    listed = {name for name in imports()["startup.assembly.capabilities"] if name.startswith("startup.")}
    listed -= {"startup.assembly.capability"}
    yield Fact("capabilities that the assembly names", len(imports()["startup.assembly.setup"] & listed), 0)


def kinds_known_by_passes() -> set[str]:
    """Return the resources that modules of scheduler/ import, but for those that every request holds or may wait for.

    `standard` puts them together, and they know each other.
    """
    room = "engine.scheduler.resources."
    common = {f"{room}{name}" for name in ("resource", "rows", "pages", "transfers")}
    passes = [m for m in trees() if m.startswith("engine.scheduler.") and not m.startswith(room)]
    known = {name for module in passes if module != "engine.scheduler.standard" for name in imports().get(module, ())}
    return {name for name in known if name.startswith(room)} - common


def known_by(prefix: str) -> set[str]:
    """Return the rooms of ours that modules below a prefix import."""
    names = {name for module, own in imports().items() if module.startswith(prefix) for name in own}
    return {room_of(name) for name in names if name in trees()} - {""}


def num_questions(tree: ast.Module) -> int:
    """Count comparisons of a capability with None."""
    compared = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return sum(
        any(isinstance(one, ast.Constant) and one.value is None for one in node.comparators)
        and getattr(node.left, "attr", getattr(node.left, "id", "")) in CAPABILITIES
        for node in compared
    )


def facts_of_sizes() -> Iterator[Fact]:
    """Measure functions, classes, crumbs and docstrings that only point elsewhere."""
    functions, classes, pointing = 0, 0, 0
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            docstring = ast.get_docstring(node) or ""
            pointing += docstring.startswith("See `")
            if isinstance(node, ast.Module):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            is_class = isinstance(node, ast.ClassDef)
            classes += is_class and length > LONGEST_CLASS
            functions += not is_class and length > LONGEST_FUNCTION and "triton" not in module
    yield Fact(f"functions above {LONGEST_FUNCTION} lines outside Triton", functions, 0)
    yield Fact(f"classes above {LONGEST_CLASS} lines", classes, 2)
    readers = Counter(name for names in imports().values() for name in names)
    small = [m for m in trees() if m and readers[m] == 1 and num_lines(m) <= CRUMB]
    yield Fact(f"files of at most {CRUMB} lines with one reader", len(small), 15)
    yield Fact("docstrings that only point elsewhere", pointing, 20)
    sources = (path for folder in FOLDERS for path in (TOP / folder).rglob("*.py*") if path.suffix in (".py", ".pyi"))
    clauses = sum(len(NOUN_CLAUSE.findall(path.read_text(encoding="utf-8"))) for path in sources)
    yield Fact("docstrings that begin with a noun clause", clauses, 0)


def num_lines(module: str) -> int:
    """Return the number of lines of a module's file; a package counts as long, since it is no crumb."""
    path = SOURCE / f"{module.replace('.', '/')}.py"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else CRUMB + 1


def main() -> int:
    """Print a line for each fact; return 1 if one is lost."""
    gc.disable()  # syntax trees live to the end: to look through them for garbage took longer than to read them
    lost = False
    for fact in facts():
        state = "LOST" if fact.is_lost else "" if fact.value <= fact.most else "to do"
        print(f"{fact.value:5d}  at most {fact.most:3d}  {state:5s}  {fact.name}")
        lost |= fact.is_lost
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
