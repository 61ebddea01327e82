"""Load the files of the page: read once, compressed once, named by their content."""

from __future__ import annotations

import gzip
import hashlib
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "web" / "static"
PAGE = "index.html"
# Below this path, seen from the page, lie all files but the page itself.
PREFIX = "web/"

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset:
    """One file of the page.

    Attributes:
        name: its path below the folder, with slashes.
        body: its bytes.
        etag: a name of its content, in quotes as HTTP wants it.
    """

    def __init__(self, name: str, body: bytes) -> None:
        self.name = name
        self.body = body
        self.media_type = _MEDIA_TYPES[Path(name).suffix]
        self.etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'

    @cached_property
    def compressed(self) -> bytes:
        """Its bytes compressed with gzip, the same in every process."""
        return gzip.compress(self.body, 9, mtime=0)


def read_assets() -> dict[str, Asset]:
    """Return the files that browsers may have, by name, without the notes and licences beside them."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in _MEDIA_TYPES)
    names = [path.relative_to(FOLDER).as_posix() for path in paths]
    return {name: Asset(name, path.read_bytes()) for name, path in zip(names, paths, strict=True)}
