"""THREATS row B: every route is guarded unless it is on the short open list, however its path is written; nothing
else listens."""

import re
import stat
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.threats.raw_http import ask, status
from tokenmill.serving.server.http.page import page_routes

OPEN = {"/health", "/livez", "/readyz", "/ping", "/version"} | set(page_routes())
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT")
TCP_LISTEN = "0A"


@pytest.fixture(scope="module")
def routes(guarded_server):
    """Every path that the server has, with its parameters filled in."""
    paths = guarded_server.http.get(f"{guarded_server.url}/openapi.json").json()["paths"]
    found = {re.sub(r"\{\w+\}", "x", path.replace("{model}", "echo")) for path in paths}
    assert len(found) > 15
    assert not any("{" in path for path in found)
    return sorted(found | {"/docs", "/openapi.json", "/", "/nothing"})


def disguises(path: str) -> list[str]:
    """The same path for whoever decodes or normalizes it once more than the guard."""
    return [
        "/" + path,
        path + "/",
        path.replace("/", "//"),
        "/." + path,
        "/health/.." + path,
        "/health/..;" + path,
        "/health;" + path,
        "/health%2f.." + path,
        "/health/%2e%2e" + path,
        "/health%00" + path,
        "/health?x=" + path,
        "/health%3f" + path,
        "/health#" + path,
        "/%76" + path[2:] if path.startswith("/v") else "/%68ealth" + path,
        path.upper(),
        path[:1] + path[1:].replace("/", "%2f"),
        path[:1] + path[1:].replace("/", "%5c"),
        "http://x" + path,
        "http://health" + path,
    ]


def may_be_open(path: str) -> bool:
    """/health with a query or a fragment, and other spellings of an open route itself, slashes too many among them."""
    plain = re.split("[?#]", unquote(path))[0].removeprefix("http://x").removeprefix("http://health")
    return (re.sub("/+", "/", plain).rstrip("/") or "/") in OPEN


def test_without_a_key_only_the_open_routes_answer(guarded_server, routes):
    for path in routes:
        for headers in ([], ["Authorization: Bearer wrong"], ["Authorization: Bearer"], ["X-Api-Key: wrong"],
                        ["Authorization: Basic a2V5LW9mLW9uZS10ZW5hbnQ="], ["Authorization: key-of-one-tenant"],
                        ["Authorization: Bearer key-of-one-tenant,key-of-another"],
                        ["Host: localhost"], ["X-Forwarded-For: 127.0.0.1"], ["X-Original-URL: /health"],
                        ["X-Rewrite-Url: /health"]):  # fmt: skip
            reply = ask(guarded_server.url, "GET", path, *headers)
            assert (status(reply) == 401) == (path not in OPEN), (path, headers, reply[:300])


@pytest.mark.parametrize("method", METHODS)
def test_no_method_goes_around_the_guard(guarded_server, routes, method):
    for path in routes:
        reply = ask(guarded_server.url, method, path)
        if path not in OPEN:
            assert status(reply) in (400, 401), (method, path, reply[:300])


def test_no_way_to_write_a_path_goes_around_the_guard(guarded_server, routes):
    for path in routes:
        for disguise in disguises(path):
            reply = ask(guarded_server.url, "GET", disguise)
            if not may_be_open(disguise):
                assert status(reply) in (400, 401), (disguise, reply[:300])


def test_with_a_key_the_disguises_lead_nowhere_either(guarded_server):
    for disguise in disguises("/v1/models"):
        reply = ask(guarded_server.url, "GET", disguise, "Authorization: Bearer key-of-one-tenant")
        assert status(reply) in (200, 307, 400, 404), (disguise, reply[:300])


def test_any_of_the_keys_opens_and_only_whole_keys_do(guarded_server):
    def answer(key):
        return status(ask(guarded_server.url, "GET", "/v1/models", f"Authorization: Bearer {key}"))

    assert [answer(key) for key in ("key-of-one-tenant", "key-of-another")] == [200, 200]
    for key in ("key-of-one-tenan", "key-of-one-tenantx", "KEY-OF-ONE-TENANT", "key", "*", "key-of-%", "null"):
        assert answer(key) == 401


def test_the_processes_listen_on_no_port_but_the_servers(guarded_server):
    pids = [guarded_server.api_pid, *guarded_server.children().values()]
    assert len(pids) >= 3
    sockets = {link for pid in pids for link in links(pid)}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == TCP_LISTEN and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                listening.append((address, int(port, 16)))
    assert listening == [("0100007F", int(guarded_server.url.rsplit(":", 1)[1]))], "the loopback, and one port"


def links(pid: int) -> list[str]:
    return [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]


def test_the_sockets_inside_are_in_a_private_folder(guarded_server):
    (folder,) = guarded_server.private.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir()}
    assert names >= {"launch.json", "api.ipc", "engine-0.ipc", "worker-0.ipc"}
    others = {".stacks", ".ask", ".running"}  # of a process that hangs or dies: its stacks, and what it was at
    assert {Path(name).suffix for name in names} <= {".json", ".ipc", *others}
    assert "key-of" not in (folder / "launch.json").read_text(), "children have no use for the keys"
