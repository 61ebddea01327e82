"""List and remove the models of the hub in this machine's cache.

The layout is huggingface-hub's: a folder `models--owner--name` with `blobs/`, which hold the bytes, and `snapshots/`, a
folder of links for each revision. A download that is not finished is a blob that ends with `.incomplete`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.sizes import size_text

_PREFIX = "models--"


class CachedModel(msgspec.Struct, frozen=True):
    """One model of the cache.

    Attributes:
        id: on the hub.
        num_bytes: on the disk, the parts of unfinished downloads among them.
        num_revisions: number of its commits; they share the files that are the same.
        last_used: seconds since the epoch.
        is_unfinished: a download was interrupted; pulling it again goes on from there.
    """

    id: str
    folder: Path
    num_bytes: int
    num_revisions: int
    last_used: float
    is_unfinished: bool


def cache_folder(download_dir: str | None = None) -> Path:
    """Return the folder of the hub's models: huggingface-hub's own cache unless another one is named."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(download_dir or HF_HUB_CACHE).expanduser()


def cached_snapshot(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of a revision as far as it is in the cache; None: nothing of it is."""
    folder = cache_folder(download_dir) / (_PREFIX + model.replace("/", "--"))
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    found = folder / "snapshots" / (commit or "")
    return found if commit and found.is_dir() else None


def cached_models(cache: Path) -> list[CachedModel]:
    """Return all models of a cache by name; empty if there is no such folder."""
    found = [_describe(folder) for folder in cache.glob(f"{_PREFIX}*") if folder.is_dir() and not folder.is_symlink()]
    return sorted(found, key=lambda model: model.id)


def listing(cache: Path) -> str:
    """Return a line for each model, and one for all."""
    models = cached_models(cache)
    width = max((len(model.id) for model in models), default=0)
    lines = []
    for model in models:
        state = "unfinished, pull it again" if model.is_unfinished else f"{model.num_revisions} revision(s)"
        used = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        lines.append(f"{model.id:<{width}}  {size_text(model.num_bytes):>11}  used {used}  {state}")
    return "\n".join([*lines, f"{size_text(sum(one.num_bytes for one in models))} in {len(models)} models of {cache}"])


def remove(cache: Path, ids: Sequence[str]) -> int:
    """Delete models, all revisions of each; delete nothing if one of them is unknown.

    Returns:
        The bytes that are free now.

    Raises:
        InvalidConfig: a model is not in the cache.
        TokenMillError: a file cannot be deleted.
    """
    known = {model.id: model for model in cached_models(cache)}
    if missing := [name for name in ids if name not in known]:
        raise InvalidConfig(f"{missing[0]} is not in {cache}; `tokenmill list` shows what is")
    chosen = [known[name] for name in dict.fromkeys(ids)]
    for model in chosen:
        try:
            shutil.rmtree(model.folder)
        except OSError as error:
            raise TokenMillError(f"cannot delete {error.filename}: {error.strerror}") from error
    return sum(model.num_bytes for model in chosen)


def _describe(folder: Path) -> CachedModel:
    files = [path for path in folder.glob("blobs/*") if path.is_file()]
    # Where links are not possible, snapshots hold the files themselves.
    files += [path for path in folder.glob("snapshots/**/*") if path.is_file() and not path.is_symlink()]
    states = [path.stat() for path in files]
    return CachedModel(
        id=folder.name.removeprefix(_PREFIX).replace("--", "/"),
        folder=folder,
        num_bytes=sum(state.st_size for state in states),
        num_revisions=sum(path.is_dir() for path in folder.glob("snapshots/*")),
        last_used=max((state.st_atime for state in states), default=folder.stat().st_mtime),
        is_unfinished=any(path.suffix == ".incomplete" for path in files),
    )
