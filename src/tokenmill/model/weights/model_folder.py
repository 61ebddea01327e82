"""Find the models below a folder: checkpoints, GGUF files, and what the hub's cache holds.

Only names, sizes and times are read. Of a split GGUF file the parts count once; a tower (`mmproj`), statistics and
drafts beside a model are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tokenmill.config.gguf_names import SUFFIX, choose_tower, is_model, split_place, with_parts
from tokenmill.config.model_files import has_only_gguf
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.model_description import FoundModel

_HUB = "models--"
_DEEPEST = 6
_QUANTIZATION = re.compile(r"(?:UD-)?(?:I?Q\d\w*|B?F(?:16|32)|MXFP\d\w*)$", re.IGNORECASE)


def find_models(folder: Path) -> list[FoundModel]:
    """Return the models below a folder, by name.

    Raises:
        InvalidConfig: there is no such folder, or it cannot be read.
    """
    if not folder.is_dir():
        raise InvalidConfig(f"--models-dir {folder}: there is no such folder; make it, or name another one")
    try:
        found = list(_below(folder, "", 0))
    except OSError as error:
        raise InvalidConfig(f"--models-dir {error.filename}: {error.strerror}") from error
    by_name: dict[str, FoundModel] = {}
    for model in found:
        # A file beside a folder of the same name.
        name = model.name if model.name not in by_name else f"{model.name}{SUFFIX}"
        by_name.setdefault(name, FoundModel(name, model.path, model.num_bytes, model.modified))
    return sorted(by_name.values(), key=lambda model: model.name)


def found_model(name: str, model: str) -> FoundModel:
    """Return the model that a preset names: a path, a hub id or a catalogue name; with its size if it is a path."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _described(name, path, _weights(path))
    if path.is_file():
        return _of_file(name, path, sorted(one.name for one in path.parent.iterdir()))
    return FoundModel(name, model)


def _below(folder: Path, name: str, depth: int) -> Iterator[FoundModel]:
    if folder.name.startswith(_HUB):
        snapshot = _snapshot(folder)
        if snapshot is not None:
            yield from _below(snapshot, folder.name.removeprefix(_HUB).replace("--", "/"), _DEEPEST)
        return
    if (folder / "config.json").is_file() and not has_only_gguf(folder):
        if weights := _weights(folder):
            yield _described(name or folder.name, folder, weights)
        return
    names = sorted(one.name for one in folder.iterdir() if one.is_file())
    models = [one for one in names if is_model(one)]
    for file in models:
        yield _of_file(_name_of(file, name, len(models)), folder / file, names)
    if depth < _DEEPEST:
        for child in sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")):
            yield from _below(child, f"{name}/{child.name}" if name else child.name, depth + 1)


def _name_of(file: str, folder: str, count: int) -> str:
    """Return the name of a GGUF file: its folder's, if it is alone there, with its quantization if it has one."""
    place = split_place(file)
    stem = file.removesuffix(SUFFIX) if place is None else place.stem
    if not folder:
        return stem
    if count == 1:
        return folder
    kind = _QUANTIZATION.search(stem)
    return f"{folder}:{kind[0]}" if kind else f"{folder}/{stem}"


def _of_file(name: str, path: Path, names: list[str]) -> FoundModel:
    tower = choose_tower(names, path.name)
    files = [path.with_name(one) for one in [*with_parts(path.name, names), *([tower] if tower else [])]]
    return _described(name, path, files)


def _described(name: str, path: Path, files: list[Path]) -> FoundModel:
    states = [file.stat() for file in files]
    newest = max((state.st_mtime for state in states), default=0.0)
    return FoundModel(name, str(path), sum(state.st_size for state in states), newest)


def _weights(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.suffix in (".safetensors", SUFFIX) and file.is_file()]


def _snapshot(folder: Path) -> Path | None:
    """Return the folder of the main revision, or of the newest, of a model of the hub's cache."""
    ref = folder / "refs" / "main"
    named = folder / "snapshots" / ref.read_text().strip() if ref.is_file() else None
    if named is not None and named.is_dir():
        return named
    return max(folder.glob("snapshots/*/"), key=lambda one: one.stat().st_mtime, default=None)
