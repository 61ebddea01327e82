"""The files of the page: small, whole, nothing in them from elsewhere, and others' libraries as they were published."""

import hashlib
import re
import tomllib

import pytest

from tests.serving.server.test_app import make_app, request
from tokenmill.serving.server.http.page import FOLDER, PAGE, page_routes, read_assets

MOST_COMPRESSED_BYTES = 150_000  # of what comes at once
MOST_LATER_BYTES = 450_000  # of what comes with the first formula and the first code
MOST_PDF_BYTES = 600_000  # of what comes with the first PDF
MOST_DIAGRAM_BYTES = 1_000_000  # of what comes with the first diagram that is drawn
MAX_FILE_LINES = 400
VENDOR = FOLDER / "vendor"
RECORDS = tomllib.loads((VENDOR / "vendor.toml").read_text())["file"]
OWN = [path for path in (*FOLDER.glob("*"), *FOLDER.glob("texts/*")) if path.is_file()]


def test_the_page_is_small_enough_to_come_at_once():
    sizes = {name: len(asset.compressed) for name, asset in read_assets().items()}
    at_once = reached(follows_lazy=False)
    assert 20_000 < sum(size for name, size in sizes.items() if name in at_once) <= MOST_COMPRESSED_BYTES
    later = {name: size for name, size in sizes.items() if name not in at_once}
    of_pdf, of_diagram = (
        sum(later.pop(name) for name in list(later) if word in name) for word in ("/pdf.", "/mermaid.")
    )
    assert 300_000 < of_pdf <= MOST_PDF_BYTES
    assert 300_000 < of_diagram <= MOST_DIAGRAM_BYTES
    assert sum(later.values()) <= MOST_LATER_BYTES


def test_libraries_are_what_is_written_down():
    files = [path for path in VENDOR.rglob("*") if path.is_file() and path.parent.name != "licences"]
    there = {path.relative_to(VENDOR).as_posix() for path in files} - {"vendor.toml"}
    assert {record["name"] for record in RECORDS} == there
    for record in RECORDS:
        assert hashlib.sha256((VENDOR / record["name"]).read_bytes()).hexdigest() == record["sha256"], record["name"]
        assert record["integrity"].startswith("sha512-")
        assert len((VENDOR / record["licence_file"]).read_text()) > 500
    assert {record["licence"] for record in RECORDS} <= {"MIT", "ISC", "Apache-2.0", "BSD-3-Clause"}


def reached(follows_lazy: bool) -> set[str]:
    """The files that the page names: by its own tags, and by the imports of what these name; lazily, by what they
    fetch later, and the fonts of style sheets."""
    found, work = set(), [PAGE]
    while work:
        name = work.pop()
        if name in found:
            continue
        found.add(name)
        if name.endswith(".html"):
            named = re.findall(r'(?:src|href)="([^"]+)"', (FOLDER / name).read_text())
            work += [one.removeprefix("web/") for one in named]
        if "/" not in name and name.endswith(".js"):
            text = (FOLDER / name).read_text()
            if follows_lazy and "import(`./texts/" in text:
                work += [f"texts/{one.name}" for one in (FOLDER / "texts").iterdir()]
            work += [one.removeprefix("./") for one in re.findall(r'^import .* from "(.+)";$', text, re.MULTILINE)]
            work += re.findall(r'"\./(vendor/[^"]+|[^"]+\.html)"', text) if follows_lazy else []
        if name.endswith(".css"):
            folder = name.rpartition("/")[0]
            work += [f"{folder}/{one}" for one in re.findall(r"url\(([^)]+\.woff2)\)", (FOLDER / name).read_text())]
    return found


def test_every_file_is_reached_from_the_page_and_all_that_is_named_is_there():
    assert reached(follows_lazy=True) == set(read_assets())


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_files_are_short_and_have_nothing_inline_or_from_elsewhere(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=\"|style=\"|javascript:", text)
    assert not re.findall(r"https?://(?!www\.w3\.org/)", text.replace('"https?:|mailto:"', ""))
    if path.suffix == ".js":
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


def test_a_file_is_named_by_its_content_and_comes_compressed():
    app = make_app(api_key=("key",))
    for path in page_routes():
        reply = request(app, "GET", path, headers={"Accept-Encoding": "gzip"})
        assert reply.status_code == 200
        assert reply.headers["content-encoding"] == "gzip"
        plain = request(app, "GET", path, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert reply.content == plain.content
        again = request(app, "GET", path, headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_nothing_of_a_page_acts_but_its_own_scripts():
    app = make_app()
    for path in page_routes():
        headers = request(app, "GET", path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        if path == "/web/diagram.html":  # may write into itself, and reaches nothing
            assert policy["default-src"] == policy["base-uri"] == "'none'"
            assert policy["sandbox"] == "allow-scripts"
            assert policy["frame-ancestors"] == policy["script-src"] == "'self'"
            assert "connect-src" not in policy and "img-src" not in policy
            continue
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["trusted-types"] == "pdf"


def test_behind_a_proxy_the_page_needs_no_key_either():
    app = make_app(api_key=("key",), root_path="/proxy")
    for path in page_routes():
        assert request(app, "GET", "/proxy" + path).status_code == 200
    for path in ("/web/", "/web/vendor.toml", "/web/vendor/vendor.toml", "/web/../v1/models", "/web/app.js/x", "/live"):
        assert request(app, "GET", path).status_code == 401, path
