"""Move modules to the folders of the new house, rewrite every mention of them, and prove that nothing else changed.

    python tools/move_modules.py move            # once, on a clean checkout: moves, rewrites, formats
    python tools/move_modules.py prove BASE      # compare every module's syntax tree with the revision before the moves

The proof compares trees without imports and docstrings; strings that name modules or files are mapped first.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
# From -> to, as paths below src/tokenmill without a suffix: of a folder all that is in it. The longest match counts.
PLACES = {
    # core, config, ipc: what all speak of, what can be set, how processes speak
    "machine/sizes": "core/sizes",
    "config": "config/configs",
    "config_checks": "config/checks",
    "config_fields": "config/fields",
    "foreign_flags": "config/foreign_flags",
    "kv_transfer_config": "config/kv_transfer",
    "model_files": "config/model_files",
    "vision_config": "config/vision",
    "speculation/config": "config/speculation",
    "replicas/topology": "ipc/topology",
    "replicas/launch_file": "ipc/launch_file",
    "replicas/suspects": "ipc/suspects",
    # model: from token ids to logits and draws
    "models": "model/models",
    "models/architecture": "model/architecture/architecture",
    "models/rope_spec": "model/architecture/rope_spec",
    "attention": "model/attention",
    "kernels": "model/kernels",
    "quantization": "model/quantization",
    "weights": "model/weights",
    "machine/hub_cache": "model/weights/hub_cache",
    "machine/hub_headers": "model/weights/hub_headers",
    "machine/hub_pull": "model/weights/hub_pull",
    "sampling": "model/sampling",
    "structured": "model/structured",
    "vision": "model/vision",
    "adapters": "model/adapters",
    "parallel/shard": "model/sharding/shard",
    "parallel/collective": "model/sharding/collective",
    "parallel/experts": "model/sharding/experts",
    # engine: which tokens run when, on whose pages
    "engine": "engine/loop",
    "live": "engine/loop",
    "live/report": "engine/loop/live_report",
    "scheduler": "engine/scheduler",
    "adapters/slots": "engine/scheduler/resources/adapter_slots",
    "vision/encoder_cache": "engine/scheduler/resources/encoder_cache",
    "states": "engine/scheduler/resources",
    "states/slots": "engine/scheduler/resources/state_slots",
    "kv": "engine/kv",
    "runner": "engine/runner",
    "speculation": "engine/speculation",
    "speculation/draft_model": "engine/runner/draft_model",
    "transfer": "engine/transfer",
    "parallel": "engine/parallel",
    # startup: from a config to a running engine or rank
    "adapters/start": "startup/assembly/adapters",
    "vision/start": "startup/assembly/vision",
    "transfer/connect": "startup/assembly/kv_sources",
    "transfer/tiers": "startup/assembly/kv_tiers",
    "speculation/draft_loading": "startup/assembly/draft_loading",
    "engine/setup": "startup/assembly/setup",
    "engine/loading": "startup/assembly/loading",
    "engine/memory": "startup/assembly/memory",
    "engine/runners": "startup/assembly/runners",
    "engine/drafting": "startup/assembly/drafting",
    "engine/warm_up": "startup/assembly/warm_up",
    "engine/step_costs": "startup/assembly/step_costs",
    "engine/process": "startup/assembly/engine_process",
    "machine": "startup/machine",
    "machine/fit": "startup/sizing/fit",
    "machine/forms": "startup/sizing/forms",
    "machine/kv_size": "startup/sizing/kv_size",
    "machine/window_size": "startup/sizing/window_size",
    "machine/state_size": "startup/sizing/state_size",
    "machine/estimate": "startup/sizing/estimate",
    "parallel/group": "startup/ranks/group",
    "parallel/children": "startup/ranks/children",
    "parallel/pipeline/node": "startup/ranks/node",
    "parallel/process": "startup/assembly/rank_process",
    "parallel/follower": "startup/assembly/follower",
    "parallel/devices/follower": "startup/assembly/device_follower",
    # serving: HTTP, text, processes
    "server": "serving/server",
    "web/assets": "serving/server/assets",
    "web/live_hub": "serving/server/live_hub",
    "web": "serving/web",
    "frontend": "serving/frontend",
    "replicas": "serving/replicas",
    "routing": "serving/replicas/routing",
    "batches": "serving/batches",
    "proxy": "serving/proxy",
    "observe": "serving/observe",
    "ray": "serving/ray",
    # llm: the offline door, and the same behind a server
    "cli/model_protocol": "llm/model_protocol",
    "cli/local": "llm/local",
    "cli/remote": "llm/remote",
    "cli/parse": "config/parse",
    "cli/parser": "config/parser",
    "cli/arguments": "config/arguments",
    "cli/flags": "config/flags",
    # lab: the laboratory
    "simulate": "lab/simulate",
    "cli/bench": "lab/bench",
}
# Folders of tests that follow their modules; a test file named like a module that moved on its own follows it.
TEST_PLACES = {place: PLACES[place] for place in (
    "adapters", "attention", "batches", "engine", "frontend", "kernels", "kv", "live", "machine", "models", "observe",
    "parallel", "proxy", "replicas", "routing", "runner", "sampling", "scheduler", "server", "simulate", "speculation",
    "structured", "transfer", "vision", "web", "weights",
)}  # fmt: skip
# Of rooms that join others, what those have already.
JOINED = (
    "src/tokenmill/live/__init__.py",
    "src/tokenmill/states/__init__.py",
    "tests/live/__init__.py",
    "tests/live/conftest.py",
)
INITS = {
    "config": "Configuration: what can be set, by which name, and which values go together. Reads no environment.",
    "engine": "The engine: which tokens run when, on whose pages.",
    "engine/scheduler/resources": "Counted things that running requests hold, one file for each kind.",
    "lab": "The laboratory: simulate schedules without a model, and measure engines and servers.",
    "model/architecture": "Architecture: what a checkpoint's config says of a model, as plain data.",
    "model": "The model: from token ids to logits, and from logits to drawn tokens.",
    "model/sharding": "Sharding: which part of a model is a rank's own. Plain data and one protocol.",
    "serving": "Serving: HTTP, text and the processes behind a server.",
    "startup": "Start-up: from a config to a running engine or rank.",
    "startup/assembly": "Assembly: load the parts of an engine, or of a rank, put them together and run its process.",
    "startup/ranks": "Ranks: how the processes of one engine are started, find each other and end.",
    "startup/sizing": "How many KV pages, windows and states fit into the memory that is there.",
}
TEXT_FILES = (".py", ".pyi", ".md", ".toml", ".yml", ".yaml", ".txt", ".h", ".cpp", ".sh", ".mjs", ".js", ".html", "")
# Addresses that users write: these stay as they are.
KEPT = re.compile(r"tokenmill\.ray:")
DOTTED = re.compile(r"\b(?:tokenmill|tests)(?:\.[A-Za-z_][A-Za-z_0-9]*)+")
PATH = re.compile(r"(?<![\w/.{}-])((?:src/)?tokenmill/|tests/|)((?:[a-z_0-9]+/)*[a-z_0-9]+)(\.py|/)?(?![\w-])")


def new_place(place: str, places: dict[str, str]) -> str:
    """Return where a module or folder, as a path without suffix, goes."""
    parts = place.split("/")
    for length in range(len(parts), 0, -1):
        target = places.get("/".join(parts[:length]))
        if target is not None:
            return "/".join([target, *parts[length:]])
    return place


def new_test_place(place: str) -> str:
    """Return where a test module or folder goes: with its folder, or with the module that it is named after."""
    folder, _, name = place.rpartition("/")
    module = f"{folder}/{name.removeprefix('test_')}"
    if name.startswith("test_") and module in PLACES and folder in TEST_PLACES:
        target, _, base = PLACES[module].rpartition("/")
        return f"{target}/test_{base}"
    if place == "cli/test_bench" or place.startswith("cli/test_bench_"):
        return place.replace("cli", "lab/bench", 1)
    return new_place(place, TEST_PLACES)


def git(*arguments: str) -> str:
    """Return the output of a git command that must succeed."""
    return subprocess.run(["git", *arguments], cwd=TOP, capture_output=True, text=True, check=True).stdout


@cache
def old_modules(revision: str) -> frozenset[str]:
    """Return the dotted names of all modules and packages of src and tests at a revision."""
    names = set()
    for name in git("ls-tree", "-r", "--name-only", revision, "--", "src/tokenmill", "tests").splitlines():
        if name.endswith(".py"):
            dotted = name.removeprefix("src/").removesuffix(".py").replace("/", ".")
            names.add(dotted.removesuffix(".__init__"))
    return frozenset(names)


def new_module(dotted: str) -> str:
    """Return the new dotted name of an old module or package."""
    root, _, rest = dotted.partition(".")
    if not rest:
        return dotted
    place = rest.replace(".", "/")
    target = new_test_place(place) if root == "tests" else new_place(place, PLACES)
    return f"{root}.{target.replace('/', '.')}"


def new_file(name: str) -> str:
    """Return the new path of a tracked file of src or tests."""
    root = "tests/" if name.startswith("tests/") else "src/tokenmill/"
    if not name.startswith(root):
        return name
    place, dot, suffix = name.removeprefix(root).partition(".")
    folder, _, base = place.rpartition("/")
    map_one = new_test_place if root == "tests/" else lambda one: new_place(one, PLACES)
    if base == "__init__":
        return f"{root}{map_one(folder)}/__init__{dot}{suffix}" if folder else name
    return f"{root}{map_one(place)}{dot}{suffix}"


def rewrite_dotted(text: str, modules: frozenset[str]) -> str:
    """Rewrite dotted names of modules in any text; what follows a module's name stays."""

    def replaced(found: re.Match[str]) -> str:
        if KEPT.match(text, found.start()):
            return found.group()
        parts = found.group().split(".")
        for length in range(len(parts), 1, -1):
            name = ".".join(parts[:length])
            if name in modules:
                return ".".join([new_module(name), *parts[length:]])
        return found.group()

    return DOTTED.sub(replaced, text)


def rewrite_paths(text: str, modules: frozenset[str], bare: bool) -> str:
    """Rewrite paths of modules in any text; `bare`: also those that begin below src/tokenmill, as docs write them."""

    def replaced(found: re.Match[str]) -> str:
        prefix, place, suffix = found.groups()
        is_module = suffix == ".py"
        if not prefix and not (bare and is_module and "/" in place):
            return found.group()
        root = "tests" if prefix == "tests/" else "tokenmill"
        dotted = f"{root}.{place.replace('/', '.')}"
        if dotted not in modules:
            return found.group()
        return prefix + new_module(dotted).partition(".")[2].replace(".", "/") + (suffix or "")

    return PATH.sub(replaced, text)


def rewrite_imports(source: str, modules: frozenset[str]) -> str:
    """Rewrite `from package import module` where the module's new package is another than the package's new name."""
    lines = source.splitlines(keepends=True)
    for node in reversed(list(ast.walk(ast.parse(source)))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        pairs = [(f"{node.module}.{alias.name}", alias) for alias in node.names]
        moved = [(name, alias) for name, alias in pairs if name in modules]
        if not moved:
            continue
        groups: dict[str, list[str]] = {}
        for name, alias in pairs:
            package, _, base = new_module(name).rpartition(".") if name in modules else (node.module, "", alias.name)
            given = alias.asname or (alias.name if base != alias.name else None)
            groups.setdefault(package if name in modules else new_module(node.module), []).append(
                f"{base} as {given}" if given else base
            )
        indent = " " * node.col_offset
        text = "".join(
            f"{indent}from {marked(package)} import {', '.join(names)}\n" for package, names in groups.items()
        )
        comment = re.search(r"  #.*$", lines[node.end_lineno - 1].rstrip("\n"))
        if comment:
            text = text.rstrip("\n") + comment.group() + "\n"
        lines[node.lineno - 1 : node.end_lineno] = [text]
    return "".join(lines)


MARK = "\N{ZERO WIDTH SPACE}"


def marked(dotted: str) -> str:
    """Put a mark behind the root of a dotted name that is new already, so that it is not taken for an old one."""
    root, dot, rest = dotted.partition(".")
    return f"{root}{MARK}{dot}{rest}"


def rewrite(name: str, text: str, modules: frozenset[str]) -> str:
    """Rewrite one file's text."""
    if name.endswith(".py"):
        text = rewrite_imports(text, modules)
    text = rewrite_dotted(text, modules).replace(MARK, "")
    text = rewrite_paths(text, modules, bare=name.endswith((".md", ".h", ".cpp")) or name.startswith("src/"))
    return deepen(name, text) if name.startswith("tests/") else text


def deepen(name: str, text: str) -> str:
    """Rewrite the way from a moved test to the root of the repository."""
    deeper = new_file(name).count("/") - name.count("/")
    return re.sub(r"(Path\(__file__\)\.parents\[)(\d)\]", lambda found: f"{found[1]}{int(found[2]) + deeper}]", text)


def move() -> None:
    """Rewrite every text, then move every file."""
    modules = old_modules("HEAD")
    tracked = [
        name for name in git("ls-files").splitlines() if (TOP / name).is_file() and not (TOP / name).is_symlink()
    ]
    for name in filter(is_rewritten, tracked):
        path = TOP / name
        text = path.read_text(encoding="utf-8")
        if (changed := rewrite(name, text, modules)) != text:
            path.write_text(changed, encoding="utf-8")
    for name in JOINED:
        (TOP / name).unlink()
        tracked.remove(name)
    move_files({name: new_file(name) for name in tracked if new_file(name) != name})
    for folder, sentence in INITS.items():
        path = TOP / "src" / "tokenmill" / folder / "__init__.py"
        if not path.exists():
            path.write_text(f'"""{sentence}"""\n', encoding="utf-8")
    for folder in {folder for path in (TOP / "tests").rglob("*.py") for folder in path.relative_to(TOP).parents}:
        if folder != Path():
            (TOP / folder / "__init__.py").touch()
    git("add", "-A", "src", "tests")


def is_rewritten(name: str) -> bool:
    """Return whether a file's text may name modules; what has been written of earlier releases stays."""
    is_kept = name in ("CHANGELOG.md", "LICENSE", "tools/move_modules.py") or "static/vendor" in name
    return Path(name).suffix in TEXT_FILES and not is_kept


def move_files(targets: dict[str, str]) -> None:
    """Move files aside and then to their places: `config.py` must go before the folder `config` can come."""
    aside = TOP / "build" / "moving"
    for name, target in targets.items():
        (aside / target).parent.mkdir(parents=True, exist_ok=True)
        (TOP / name).rename(aside / target)
    for target in targets.values():
        assert not (TOP / target).exists(), f"{target} is there already"
        (TOP / target).parent.mkdir(parents=True, exist_ok=True)
        (aside / target).rename(TOP / target)
    for folder in sorted({TOP / Path(name).parent for name in targets}, reverse=True):
        if folder.exists() and not any(one.name != "__pycache__" for one in folder.iterdir()):
            shutil.rmtree(folder)


def bare_tree(source: str, modules: frozenset[str] | None, name: str) -> str:
    """Dump a syntax tree without imports and docstrings; with `modules`, strings are mapped as the moves map them."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                kept = [one for one in body if not isinstance(one, ast.Import | ast.ImportFrom) and not is_text(one)]
                setattr(node, field, kept)
        if modules is not None and isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = rewrite_paths(rewrite_dotted(node.value, modules), modules, bare=name.startswith("src/"))
    return ast.dump(tree)


def is_text(node: ast.stmt) -> bool:
    """Return True for a docstring, or a string below an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def differences(base: str) -> Iterator[str]:
    """Yield the new path of every module whose tree is not that of the module it was."""
    modules = old_modules(base)
    names = git(
        "ls-tree", "-r", "--name-only", base, "--", "src/tokenmill", "tests", "benchmarks", "tools"
    ).splitlines()
    for name in names:
        if not name.endswith(".py") or name == "tools/move_modules.py":
            continue
        target = TOP / new_file(name)
        before = bare_tree(deepen(name, git("show", f"{base}:{name}")), modules, name)
        after = bare_tree(target.read_text(encoding="utf-8"), None, name) if target.exists() else "(gone)"
        if before != after:
            yield f"{name} -> {target.relative_to(TOP)}{'' if target.exists() else ' (gone)'}"


def main() -> int:
    """Move, or prove; return 1 if a module's tree has changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("move", "prove"))
    parser.add_argument("base", nargs="?", default="HEAD~1", help="the revision before the moves")
    options = parser.parse_args()
    if options.what == "move":
        move()
        return 0
    changed = list(differences(options.base))
    print("\n".join([*changed, f"{len(changed)} modules differ by more than imports and docstrings"]))
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
