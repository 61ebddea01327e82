"""From the name of a model to its folder: a local one, or a snapshot from the Hugging Face hub.

huggingface-hub does the transfer and keeps its cache; it reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from tokenmill.config.gguf_names import SUFFIX, choose_file, choose_tower, split_tag, with_parts
from tokenmill.config.model_files import has_only_gguf, is_hub_id
from tokenmill.core.errors import InvalidCheckpoint, TokenMillError
from tokenmill.core.names import did_you_mean
from tokenmill.model.weights.catalogue import CATALOGUE, locate
from tokenmill.model.weights.gguf.config import takes_tower
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.folder import SIBLINGS, unpack
from tokenmill.model.weights.hub_cache import cached_snapshot

Progress = Callable[[int, int], None]


class _GgufFiles(NamedTuple):
    """A model's file, or its first part, and that of its vision tower."""

    model: Path
    tower: Path | None


WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
# `consolidated*` is a second copy of Mistral's weights; folders hold other formats.
UNWANTED = ["consolidated*", "*/*"]


def fetch(model: str, revision: str | None, download_dir: str | None, progress: Progress | None = None) -> Path:
    """Return the folder of a model, downloaded first if it is on the hub.

    Args:
        model: an existing folder, a .gguf file or a folder with some, a name of the catalogue, or `owner/name` on the
            hub; `:TAG` after a folder or hub id says which GGUF file is meant, as `:Q4_K_M`.
        revision: branch, tag or commit on the hub; None: its main branch.
        download_dir: the cache to download into; None: huggingface-hub's own.
        progress: called in this thread with (bytes done, bytes in all so far known).

    Raises:
        InvalidCheckpoint: no such folder or repository, no access, no connection; one sentence.
    """
    cache = gguf_folder(download_dir)
    if model in CATALOGUE and not Path(model).exists():
        model = locate(CATALOGUE[model], cache, progress)
    name, tag = split_tag(model)
    place = Path(model).expanduser()
    if tag is not None and not place.exists() and Path(name).expanduser().is_dir():
        return unpack(_file_in(Path(name).expanduser(), tag), cache)
    if place.is_dir():
        return unpack(_file_in(place, None), cache) if has_only_gguf(place) else place
    if place.exists():
        if place.suffix == SUFFIX:
            return unpack(place, cache)
        raise InvalidCheckpoint(
            f"{model} is a file; a checkpoint is a folder with config.json and safetensors, or a .gguf file"
        )
    if not is_hub_id(model):
        raise InvalidCheckpoint(f"there is no folder {model}, and it is not a hub id such as owner/name")
    report = progress or (lambda done, total: None)
    if tag is None:
        snapshot = _download(name, revision, download_dir, report)
        if any(snapshot.glob("*.safetensors")):
            return snapshot
    files = _download_gguf(name, tag, revision, download_dir, report)
    return snapshot if files is None else unpack(files.model, cache, files.tower)


def gguf_folder(download_dir: str | None) -> Path:
    """Return the folder for what is made of GGUF files, and for those of the catalogue; see `fetch`."""
    return Path(download_dir or "~/.cache/tokenmill").expanduser() / "gguf"


def _file_in(folder: Path, tag: str | None) -> Path:
    names = [path.name for path in folder.glob(f"*{SUFFIX}")]
    return folder / choose_file(names, tag, str(folder))


def _download_gguf(
    model: str, tag: str | None, revision: str | None, download_dir: str | None, progress: Progress
) -> _GgufFiles | None:
    """Return a repository's GGUF file that a tag means, and its tower; without a connection, those in the cache.

    None: it has none, and no tag asks for one.

    Raises:
        InvalidCheckpoint: see `hub_errors` and `choose_file`.
    """
    from huggingface_hub import HfApi

    try:
        with hub_errors(model, revision):
            # Not `list_repo_files`, which tries for 23 seconds where there is no connection.
            names = [one.rfilename for one in HfApi().model_info(model, revision=revision).siblings or ()]
    except InvalidCheckpoint:
        snapshot = cached_snapshot(model, revision, download_dir)
        names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")] if snapshot else []
        if not snapshot or not names:
            raise
        chosen = choose_file(names, tag, f"the cache's copy of {model}")
        beside = choose_tower(names, chosen)
        return _GgufFiles(snapshot / chosen, snapshot / beside if beside else None)
    files = gguf_files(names, tag, f"the hub's {model}")
    if not files:
        return None
    path = _download(model, revision, download_dir, progress, files, []) / files[0]
    beside = choose_tower(names, files[0])
    if beside is None or not takes_tower(open_gguf(path).metadata):
        return _GgufFiles(path, None)
    return _GgufFiles(path, _download(model, revision, download_dir, progress, [beside], []) / beside)


def gguf_files(names: Sequence[str], tag: str | None, where: str) -> list[str]:
    """Return of a repository's files the GGUF file that a tag means, all its parts, and the small files beside it.

    Not the file of a vision tower: the model's own tells whether one is wanted.

    Returns:
        The file, or its first part, first; empty if there is none and no tag asks for one.

    Raises:
        InvalidCheckpoint: see `choose_file`.
    """
    if tag is None and not any(name.endswith(SUFFIX) for name in names):
        return []
    chosen = choose_file(names, tag, where)
    folder = chosen.rpartition("/")[0]
    beside = [name for name in names if name.rpartition("/")[0] == folder and name.rpartition("/")[2] in SIBLINGS]
    return [*with_parts(chosen, names), *beside]


@contextmanager
def hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn errors between here and the hub into one sentence.

    Raises:
        InvalidCheckpoint: no such repository, no access, no connection.
    """
    # Imported here: a second of work that a local folder does not need.
    import httpx
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    hint = "" if "/" in model else did_you_mean(model, CATALOGUE)
    try:
        yield
    except TokenMillError:
        raise
    except errors.GatedRepoError as error:
        raise InvalidCheckpoint(
            f"the hub's {model} is gated: accept its terms on the hub, then set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InvalidCheckpoint(
            f"{model} is neither a folder here nor a repository on the hub (or it is private){hint}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidCheckpoint(f"the hub's {model} has no revision {revision}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx.TransportError) as error:
        raise InvalidCheckpoint(
            f"cannot reach the hub for {model}{at}, and there is no complete copy in the cache; "
            f"check the connection, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder{hint}"
        ) from error
    except Exception as error:
        # Whatever library carries the bytes has errors of its own; here they are all the same: it did not come.
        reason = str(error).strip().partition("\n")[0]
        raise InvalidCheckpoint(f"cannot download {model}{at} from the hub: {reason}") from error


def _download(
    model: str,
    revision: str | None,
    download_dir: str | None,
    progress: Progress,
    wanted: Sequence[str] = WANTED,
    unwanted: Sequence[str] = UNWANTED,
) -> Path:
    from huggingface_hub import snapshot_download

    # huggingface-hub counts in threads of its own; what `progress` uses, a socket perhaps, may belong to this one.
    counts: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
    with hub_errors(model, revision), ThreadPoolExecutor(1) as pool:
        snapshot = pool.submit(
            snapshot_download,
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
            tqdm_class=_byte_counter(lambda done, total: counts.put((done, total))),
        )
        snapshot.add_done_callback(lambda _: counts.put(None))
        while (count := counts.get()) is not None:
            progress(*count)
        return Path(snapshot.result())


def _byte_counter(progress: Progress) -> type[Any]:
    """Return a progress bar class that draws nothing and passes the bytes on.

    huggingface-hub makes one bar per thing it counts (files; bytes received; bytes on disk); the byte bars are told by
    their unit, and the furthest of them is reported.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()
    bars: list[Any] = []

    class ByteCounter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            if kwargs.get("unit") == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += n or 0
                if self in bars:
                    total = max(bar.total or 0 for bar in bars)
                    progress(min(int(max(bar.n for bar in bars)), int(total)), int(total))

    return ByteCounter
