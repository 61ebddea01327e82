"""THREATS row B: a web page cannot use a server without a key through the browser of somebody who can reach it."""

import pytest

from tests.serving.server.running_proxy import start_proxy
from tests.serving.server.running_server import start_server
from tests.threats.conftest import KEYS
from tests.threats.raw_http import ask, exchange, status
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.server.http.browser_guard import UPLOAD_ROUTES

FRIEND = "https://friend.example"
JSON = "Content-Type: application/json"
NAMES = {"allowed_origins": (FRIEND,), "allowed_hosts": ("mill.example",)}
FOREIGN_ORIGINS = ["https://evil.example", "http://localhost.evil.example", "null", "http://localhost:1", "", "file://",
                   "https://friend.example.evil.example", "http://friend.example"]  # fmt: skip
FOREIGN_HOSTS = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "0.0.0.0", "[::2]",
                 "10.0.0.1", "localhost@evil.example", "mill.example.evil.example", "", "[::1", "::1", "127.1", "*",
                 "localhost:evil.example", "docker.internal", "x.host.docker.internal", "local",
                 "box.local.evil.example", "evil-local"]  # fmt: skip
KNOWN_HOSTS = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:8000", "mill.example",
               "Mill.Example:1234", "host.docker.internal:8000", "host.containers.internal", "box.local",
               "app.localhost"]  # fmt: skip


@pytest.fixture(scope="module")
def open_server(stub_folder):
    """A server on the loopback that wants no key."""
    with start_server(EngineConfig(model=str(stub_folder)), **NAMES) as server:
        yield server


@pytest.fixture(scope="module")
def open_proxy(open_server):
    """A proxy before it."""
    with start_proxy([open_server.url], [open_server.url], **NAMES) as proxy:
        yield proxy


@pytest.fixture(params=["open_server", "open_proxy"])
def opened(request):
    """Either."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def routes(open_server):
    """(method, path) of every route but the stream that has no end."""
    paths = open_server.http.get(f"{open_server.url}/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods if path != "/live"]
    assert len(found) > 20
    filled = [(m, p.replace("{model}", "echo").replace("{id}", "x").replace("{response_id}", "x")) for m, p in found]
    return [*filled, ("PUT", "/v1/models"), ("POST", "/nothing"), ("PATCH", "/v1/responses/x")]


def send(server, method, path, *headers, host=None, body=b""):
    """Status of a request as a browser might be made to send it."""
    host = server.url.removeprefix("http://") if host is None else host
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    lines += [f"Content-Length: {len(body)}"] if body else []
    return status(exchange(server.url, "\r\n".join([*lines, "", ""]).encode() + body))


def test_what_changes_something_is_not_for_pages_of_others(opened, routes):
    for method, path in routes:
        for origin in FOREIGN_ORIGINS:
            found = send(opened, method, path, f"Origin: {origin}", JSON, body=b"{}")
            assert (found == 403) == (method != "GET"), (method, path, origin, found)
    headers = [f"Origin: {FRIEND}", "Origin: https://evil.example"]
    assert send(opened, "POST", "/pause", *headers) == 403, "the second counts as well"
    assert opened.http.get(f"{opened.url}/health_generate").status_code == 200, "nothing paused it"


def test_pages_of_its_own_and_of_friends_and_what_is_no_page_may(opened):
    own = opened.url
    body = b'{"prompt": "x", "max_tokens": 1}'
    for headers in ([], [f"Origin: {own}"], [f"Origin: {FRIEND}"]):
        assert send(opened, "POST", "/v1/completions", JSON, *headers, body=body) == 200, headers
        assert send(opened, "POST", "/resume", *headers) == 200
    at_home = ("Origin: https://mill.example", JSON)
    assert send(opened, "POST", "/v1/completions", *at_home, host="mill.example", body=body) == 200


UNSAID = ["X: y", "Content-Type: application/x-www-form-urlencoded", "Content-Type:"]
OF_BROWSERS = ["User-Agent: Mozilla/5.0", "Referer: https://evil.example/", "Cookie: a=b", "Sec-Fetch-Site: cross-site"]


def test_a_body_must_say_that_it_is_json(opened, routes):
    for method, path in routes:
        for headers in (["Content-Type: text/plain"], ["Content-Type: multipart/form-data; boundary=x"],
                        ["Content-Type: text/plain; application/json"], ["Content-Type: application/jsonp"],
                        ["Content-Type: application/x-www-form-urlencoded", "Content-Type: text/plain"],
                        *([unsaid, mark] for unsaid in UNSAID for mark in OF_BROWSERS)):  # fmt: skip
            found = send(opened, method, path, *headers, body=b"{}")
            # Files come as forms; a page of another origin is known by its Origin all the same.
            is_file = method == "POST" and path in UPLOAD_ROUTES and "multipart" in headers[0]
            assert (found == 415) == (method != "GET" and not is_file), (method, path, headers, found)
    body = b'{"prompt": "x", "max_tokens": 1}'
    for header in (JSON, "content-type: Application/JSON; charset=utf-8"):
        assert send(opened, "POST", "/v1/completions", header, body=body) == 200


def test_what_no_browser_sends_need_not_say_that_it_is_json(opened):
    body = b'{"prompt": "x", "max_tokens": 1}'
    for header in UNSAID:
        assert send(opened, "POST", "/v1/completions", header, "User-Agent: curl/8.5.0", body=body) == 200, header
        assert send(opened, "POST", "/v1/completions", header, "Origin: null", body=body) == 403, header
        assert send(opened, "POST", "/v1/files", header, body=body) == 415, header
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n%s\r\n"
    for mark, expected in ((b"", 400), (b"Sec-Fetch-Mode: no-cors\r\n", 415)):
        assert status(exchange(opened.url, chunked % mark + b"2\r\n{}\r\n0\r\n\r\n")) == expected, mark


def test_the_server_is_called_by_a_name_of_its_own(opened, routes):
    for host in FOREIGN_HOSTS:
        for method, path in [
            *routes,
            ("GET", "/docs"),
            ("GET", "/live"),
            ("GET", "/"),
            ("HEAD", "/health"),
            ("OPTIONS", "/v1/models"),
        ]:
            assert send(opened, method, path, host=host) == 403, (method, path, host)
    for host in KNOWN_HOSTS:
        assert send(opened, "GET", "/v1/models", host=host) == 200, host


@pytest.mark.parametrize("name", ["open_server", "guarded_server", "open_proxy", "guarded_proxy"])
def test_a_request_has_one_host(request, name):
    server = request.getfixturevalue(name)
    key = f"Authorization: Bearer {KEYS[0]}\r\nConnection: close\r\n"
    for path in ("/v1/models", "/health", "/nothing"):
        for hosts, expected in (("", 400), ("Host: localhost\r\nHost: localhost\r\n", 400), ("Host: localhost\r\n", 0)):
            found = status(exchange(server.url, f"GET {path} HTTP/1.1\r\n{hosts}{key}\r\n".encode()))
            assert (found == 400) == (expected == 400), (path, hosts, found)
    old = f"GET /health HTTP/1.0\r\n{'Host: localhost' if name.startswith('open') else 'X: y'}\r\n\r\n"
    assert status(exchange(server.url, old.encode())) == 200


@pytest.mark.parametrize("name", ["open_server", "guarded_server", "open_proxy", "guarded_proxy"])
def test_nothing_leads_to_where_the_host_header_points(request, routes, name):
    server = request.getfixturevalue(name)
    for _, path in routes:
        for method in ("GET", "POST"):
            key = f"Authorization: Bearer {KEYS[0]}"
            host = "evil.example" if name.startswith("guarded") else "localhost"
            lines = [f"{method} {path}/ HTTP/1.1", f"Host: {host}", "Connection: close", key, "", ""]
            reply = exchange(server.url, "\r\n".join(lines).encode())
            assert not 300 <= status(reply) < 400, reply[:300]
            assert b"evil" not in reply
            assert b"\r\nlocation:" not in reply.lower()


def test_with_a_key_nobody_asks_for_names(guarded_server):
    """Pages of others do not have it."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    key = f"Authorization: Bearer {KEYS[0]}"
    reply = ask(guarded_server.url, "POST", "/v1/completions", key, "Origin: https://evil.example", body=body)
    assert status(reply) == 200
