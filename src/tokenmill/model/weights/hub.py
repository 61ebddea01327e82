"""From the name of a model to its folder: a local one, or a snapshot from the Hugging Face hub.

huggingface-hub does the transfer and keeps its cache; it reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tokenmill.config.model_files import is_hub_id
from tokenmill.core.errors import InvalidCheckpoint, TokenMillError
from tokenmill.model.weights.gguf.folder import unpack

Progress = Callable[[int, int], None]

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
# `consolidated*` is a second copy of Mistral's weights; folders hold other formats.
UNWANTED = ["consolidated*", "*/*"]


def fetch(model: str, revision: str | None, download_dir: str | None, progress: Progress | None = None) -> Path:
    """Return the folder of a model, downloaded first if it is a hub id.

    Args:
        model: an existing folder, which is returned as it is, a .gguf file, or `owner/name` on the hub.
        revision: branch, tag or commit on the hub; None: its main branch.
        download_dir: the cache to download into; None: huggingface-hub's own.
        progress: called in this thread with (bytes done, bytes in all so far known).

    Raises:
        InvalidCheckpoint: no such folder or repository, no access, no connection; one sentence.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        if folder.suffix == ".gguf":
            return unpack(folder, Path(download_dir or "~/.cache/tokenmill").expanduser() / "gguf")
        raise InvalidCheckpoint(
            f"{model} is a file; a checkpoint is a folder with config.json and safetensors, or a .gguf file"
        )
    if not is_hub_id(model):
        raise InvalidCheckpoint(f"there is no folder {model}, and it is not a hub id such as owner/name")
    return _download(model, revision, download_dir, progress or (lambda done, total: None))


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
            f"{model} is neither a folder here nor a repository on the hub (or it is private)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidCheckpoint(f"the hub's {model} has no revision {revision}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx.TransportError) as error:
        raise InvalidCheckpoint(
            f"cannot reach the hub for {model}{at}, and there is no complete copy in the cache; "
            f"check the connection, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder"
        ) from error
    except Exception as error:
        # Whatever library carries the bytes has errors of its own; here they are all the same: it did not come.
        reason = str(error).strip().partition("\n")[0]
        raise InvalidCheckpoint(f"cannot download {model}{at} from the hub: {reason}") from error


def _download(model: str, revision: str | None, download_dir: str | None, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    # huggingface-hub counts in threads of its own; what `progress` uses, a socket perhaps, may belong to this one.
    counts: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
    with hub_errors(model, revision), ThreadPoolExecutor(1) as pool:
        snapshot = pool.submit(
            snapshot_download,
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
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
