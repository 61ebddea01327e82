"""Pull a model from the hub without losing bytes that have come: large files resume at the byte where they stopped.

huggingface-hub begins a file anew in every process. So what is large is fetched here, into the place of its cache where
it looks first; small files, and the links that make up a snapshot, are left to it.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING

import httpx
import msgspec

from tokenmill.config.gguf_names import choose_tower, split_tag
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.model.weights.gguf.config import takes_tower
from tokenmill.model.weights.gguf.header import read_header
from tokenmill.model.weights.hub import UNWANTED, WANTED, fetch, gguf_files, hub_errors

if TYPE_CHECKING:
    import hashlib as hashes

Progress = Callable[[int, int], None]

CHUNK = 1 << 20
# In a row, without a byte between them.
MOST_FAILURES = 3
TIMEOUT = httpx.Timeout(30.0)


class LargeFile(msgspec.Struct, frozen=True):
    """A file that the hub keeps by the digest of its content."""

    name: str
    url: str
    num_bytes: int
    sha256: str


class Tower(msgspec.Struct, frozen=True):
    """The file of a vision tower, and the name of the model's file, which tells whether it is wanted."""

    model: str
    file: LargeFile

    def is_for(self, file: LargeFile, blobs: Path) -> bool:
        """Return True if a file is the model's and that model takes a tower."""
        return file.name == self.model and takes_tower(read_header(blobs / file.sha256).metadata)


def pull(model: str, revision: str | None, cache: Path, progress: Progress) -> Path:
    """Download a model into a cache, or what is missing of it.

    Args:
        progress: called with (bytes done, bytes in all) of the large files.

    Returns:
        Its folder.

    Raises:
        InvalidCheckpoint: no such repository, no access, no connection, or a file that is not what the hub says.
        InvalidConfig: another process pulls the same file.
    """
    from huggingface_hub import file_download, utils

    whole_name, (model, tag) = model, split_tag(model)
    try:
        files, tower = _large_files(model, tag, revision)
    except InvalidCheckpoint:
        # Without a connection a complete copy will do; else this says what is wrong.
        return fetch(whole_name, revision, str(cache))
    blobs = cache / file_download.repo_folder_name(repo_id=model, repo_type="model") / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    done, total = 0, sum(file.num_bytes for file in files)
    headers = utils.build_hf_headers()  # type: ignore[attr-defined]
    with hub_errors(model, revision), httpx.Client(headers=headers, timeout=TIMEOUT, follow_redirects=True) as client:
        while files:
            file = files.pop(0)
            if not (blobs / file.sha256).exists():
                _complete(client, file, blobs, _counted(progress, done, total))
            done += file.num_bytes
            progress(done, total)
            if tower is not None and tower.is_for(file, blobs):
                files.append(tower.file)
                total += tower.file.num_bytes
    return fetch(whole_name, revision, str(cache))


def _large_files(model: str, tag: str | None, revision: str | None) -> tuple[list[LargeFile], Tower | None]:
    """Return the files of a model's weights, and that of its tower if the model turns out to take one."""
    from huggingface_hub import HfApi, hf_hub_url

    with hub_errors(model, revision):
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
        names = [one.rfilename for one in info.siblings or ()]
        has_weights = any(_matches(name, ["*.safetensors"]) and "/" not in name for name in names)
        is_gguf = tag is not None or not has_weights
        wanted = gguf_files(names, tag, f"the hub's {model}") if is_gguf else WANTED
        large = {
            one.rfilename: LargeFile(
                one.rfilename, hf_hub_url(model, one.rfilename, revision=info.sha), one.lfs.size, one.lfs.sha256
            )
            for one in info.siblings or ()
            if one.lfs is not None
        }
    files = [
        file for name, file in large.items() if _matches(name, wanted) and (is_gguf or not _matches(name, UNWANTED))
    ]
    beside = large.get(choose_tower(names, wanted[0]) or "") if is_gguf and wanted else None
    return files, None if beside is None else Tower(wanted[0], beside)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _counted(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda count: progress(before + count, total)


def _complete(client: httpx.Client, file: LargeFile, blobs: Path, report: Callable[[int], None]) -> None:
    """Fetch what is missing of a file and put it into its place."""
    part = blobs / f"{file.sha256}.tokenmill.incomplete"
    with part.open("a+b") as target:
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidConfig(f"another process is downloading {file.name}") from None
        target.seek(0)
        digest = hashlib.sha256()
        while chunk := target.read(CHUNK):
            digest.update(chunk)
        failures = 0
        while (have := target.tell()) < file.num_bytes:
            try:
                _append(client, file, target, digest, report)
            except httpx.TransportError:
                failures = 0 if target.tell() > have else failures + 1
                if failures == MOST_FAILURES:
                    raise
        if digest.hexdigest() != file.sha256:
            target.truncate(0)
            raise InvalidCheckpoint(f"{file.name} came with other bytes than the hub says; pull it again")
    part.rename(blobs / file.sha256)


def _append(
    client: httpx.Client, file: LargeFile, target: IO[bytes], digest: hashes._Hash, report: Callable[[int], None]
) -> None:
    """Continue a file from its end, as far as the connection lasts."""
    have = target.tell()
    with client.stream("GET", file.url, headers={"Range": f"bytes={have}-", "Accept-Encoding": "identity"}) as response:
        if response.status_code != httpx.codes.PARTIAL_CONTENT and (have or response.status_code != httpx.codes.OK):
            raise InvalidCheckpoint(f"the hub answers {response.status_code} when it is asked for {file.name}")
        for chunk in response.iter_raw():
            target.write(chunk)
            digest.update(chunk)
            report(target.tell())
