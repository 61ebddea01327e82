"""A hub on localhost: the few endpoints that huggingface-hub asks when it downloads a snapshot."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves folders as repositories.

    Args:
        repositories: `owner/name` -> folder; None: a gated repository.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.downloads: list[str] = []
        self.num_bytes: Counter[str] = Counter()
        self.starts: defaultdict[str, list[int]] = defaultdict(list)
        # So many bytes of each answer with weights come, then the connection ends.
        self.cut_after: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running_hub(repositories: Mapping[str, Path | None]) -> Iterator[Hub]:
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Keep the test's output quiet."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        found = re.fullmatch(r"/(api/models/)?([\w-]+/[\w-]+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path)
        if found is None:
            self._error(404, "EntryNotFound")
            return
        _, name, verb, revision, file = found.groups()
        if name not in self.server.repositories:
            self._error(401, "RepoNotFound")
            return
        folder = self.server.repositories[name]
        if folder is None:
            self._error(403, "GatedRepo")
        elif revision not in (None, "main", COMMIT):
            self._error(404, "RevisionNotFound")
        elif verb == "resolve":
            self._file(name, folder / file)
        else:
            self._listing(name, folder, verb)

    def _listing(self, name: str, folder: Path, verb: str | None) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = [
            {"type": "file", "oid": _etag(path), "size": path.stat().st_size, "path": str(path.relative_to(folder))}
            for path in files
        ]
        siblings = [_sibling(folder, path) for path in files]
        about = {"id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        self._send(200, json.dumps(entries if verb == "tree" else about).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, path: Path) -> None:
        if not path.is_file():
            self._error(404, "EntryNotFound")
            return
        content, headers = path.read_bytes(), {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is not None:
            start, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content = content[start : end + 1]
        if self.command == "GET":
            self.server.downloads.append(path.name)
            self.server.num_bytes[path.name] += len(content)
            self.server.starts[path.name].append(int(wanted[1]) if wanted else 0)
        self._send(200 if wanted is None else 206, content, headers, self.server.cut_after if _is_large(path) else None)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"stand-in: {code}"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut_after: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut_after])
            self.close_connection = cut_after is not None


def _sibling(folder: Path, path: Path) -> dict[str, object]:
    """A file as a model's description lists it; large ones are known by their digest."""
    size = path.stat().st_size
    large = {"lfs": {"sha256": _etag(path), "size": size, "pointerSize": 130}} if _is_large(path) else {}
    return {"rfilename": str(path.relative_to(folder)), "size": size, **large}


def _is_large(path: Path) -> bool:
    return path.suffix in (".safetensors", ".gguf")


def _etag(path: Path) -> str:
    digest = hashlib.sha256() if _is_large(path) else hashlib.sha1(usedforsecurity=False)
    digest.update(path.read_bytes())
    return digest.hexdigest()
