"""THREATS row C: keys are compared as hashes in constant time; no error body shows a path, an object or a traceback."""

import dataclasses
import hmac
import json
import random
import re

import pytest

from tests.serving.server.test_app import make_app, request
from tests.threats.conftest import KEYS
from tests.threats.raw_http import ask, exchange, status
from tests.tiers import scaled
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.core.errors import Conflict, EngineDead, InvalidCheckpoint, InvalidRequest
from tokenmill.serving.server.http.errors import anthropic_body, error_body
from tokenmill.serving.server.operators.admin import public_settings

# A path of this machine, an object's address, a line of a traceback, a module or an exception of ours.
LEAKS = re.compile(
    r"/(usr|home|root|tmp|var|opt|work|etc|proc)\b|\.py\b|0x[0-9a-f]{6,}|Traceback|File \"|<[\w.]+ object|line \d+, in "
    r"|tokenmill\.\w|msgspec|starlette|KeyError|TypeError|ValueError|AssertionError"
)


def check(text: str) -> None:
    assert not LEAKS.search(text), text[:500]


def test_keys_are_compared_as_hashes_of_equal_length(monkeypatch):
    compared = []

    def compare(given, known):
        compared.append((len(given), len(known)))
        return given == known

    monkeypatch.setattr(hmac, "compare_digest", compare)
    app = make_app(api_key=KEYS)
    for header in ("Bearer x", f"Bearer {KEYS[0]}", "Bearer " + "y" * 1000, "Basic z", ""):
        compared.clear()
        request(app, "GET", "/v1/models", headers={"Authorization": header})
        assert compared == [(32, 32)] * len(KEYS), "all keys, whether one before matches or not"


def garbage(rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return json.dumps(value(rng, 3)).encode()
    fields = ["prompt", "messages", "text", "input_ids", "tokens", "n", "stop", "temperature", "sampling_params",
              "tools", "model", "input", "request_ids", "logit_bias", "stream_options", "system"]  # fmt: skip
    body = {field: value(rng, 3) for field in rng.sample(fields, rng.randrange(1, 5))}
    text = json.dumps(body).encode()
    return text[: rng.randrange(len(text))] if kind == 2 else text


# What looks like a path and is the client's own: an error may say it back.
PATHS_SENT = ["../../etc", "{% include '/etc/passwd' %}"]
LEAVES = [None, True, -1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), "", "x", "\x00", "\ud800",
          "{{ 7*7 }}", "%s%n", "é" * 50, *PATHS_SENT]  # fmt: skip


def without_paths_sent(text: str) -> str:
    return re.sub("|".join(map(re.escape, PATHS_SENT)), "", text)


def value(rng: random.Random, depth: int):
    choice = rng.randrange(6) if depth else 0
    if choice == 1:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if choice == 2:
        keys = ["role", "content", "type", "text", "function", "name", "x", ""]
        return {rng.choice(keys): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    if choice == 3:
        return [{"role": rng.choice(["user", "tool", "x"]), "content": value(rng, depth - 1)}]
    return rng.choice(LEAVES)


def test_no_error_body_shows_what_is_inside(guarded_server):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    paths = guarded_server.http.get(f"{guarded_server.url}/openapi.json").json()["paths"]
    posts = [path for path, methods in paths.items() if "post" in methods and path != "/pause"]
    num_errors = 0
    for _ in range(scaled(100)):
        path = rng.choice(posts).replace("{response_id}", "x")
        reply = guarded_server.http.post(guarded_server.url + path, content=garbage(rng))
        assert reply.status_code < 500, (path, reply.text)
        if reply.status_code >= 400:
            num_errors += 1
            error = reply.json()["error"]
            is_sentence = path.startswith("/api/") or path in ("/embed", "/predict")
            assert isinstance(error, str) == is_sentence, reply.text
            assert isinstance(error, str) or {"message", "type"} <= set(error), reply.text
            check(without_paths_sent(reply.text))
    assert num_errors > scaled(100) // 2
    assert guarded_server.http.get(f"{guarded_server.url}/health_generate").status_code == 200
    assert "Traceback" not in guarded_server.output(), guarded_server.output()[-3000:]


@pytest.mark.parametrize(
    "line",
    [b"GET", b"\x00\x01\x02", b"GET / HTTP/9.9", b"GET /\xff\xfe HTTP/1.1",
     b"G\xc3\xa9T / HTTP/1.1", b"GET http://[::1 HTTP/1.1", b"\x16\x03\x01\x02\x00\x01\x00"],
)  # fmt: skip
def test_what_is_no_http_is_answered_in_the_same_form(guarded_server, line):
    reply = exchange(guarded_server.url, line + b"\r\nHost: x\r\n\r\n")
    if reply:
        assert status(reply) == 400
        body = reply.split(b"\r\n\r\n", 1)[1].decode()
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        check(body)


def test_what_the_router_refuses_shows_nothing_either(guarded_server):
    key = f"Authorization: Bearer {KEYS[0]}"
    for method, path in (("GET", "/nothing"), ("PUT", "/v1/models"), ("GET", "/v1/models/..%2f..%2fetc%2fpasswd"),
                         ("GET", "/v1/requests/%00"), ("GET", "/v1/models/" + "x" * 5000)):  # fmt: skip
        reply = ask(guarded_server.url, method, path, key)
        assert status(reply) in (404, 405), reply[:200]
        check(re.sub(r"(GET|PUT) /\S*|`[^`]*`", "", reply.split(b"\r\n\r\n", 1)[1].decode()))


@pytest.mark.parametrize(
    "form", ["cannot read {}: it is broken", "{} has no tensor x", "{}: no", "'{}'", "({})", "a {}."]
)
def test_no_sentence_of_any_room_shows_where_a_file_lies(form):
    """Those of the engines and of the start name whole paths: the operator reads them on the screen."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for kind in (InvalidCheckpoint, InvalidRequest, EngineDead, Conflict):
        folders = "".join("/" + "".join(rng.choices("abcXYZ019._-~+@é", k=rng.randrange(1, 9))) for _ in range(3))
        error = kind(form.format(f"{folders}/model-1.safetensors"))
        for body in (error_body(error).error.message, anthropic_body(error).error.message):
            assert body == form.format("model-1.safetensors")


def test_routes_addresses_and_names_are_left_as_they_are():
    for text in ("send it to /v1/chat/completions", "see https://host/a/b/c", "image/png/x", "the model `/a/b/c`",
                 "GET /engines", "3 / 4 / 5", "and/or/nor", "a ./b/c"):  # fmt: skip
        assert error_body(InvalidRequest(text)).error.message == text


def test_settings_show_no_folder(tmp_path):
    """Every flag that is a text, as if each were a path."""
    folder = f"{tmp_path}/secret/place"
    found = []
    for config in (EngineConfig, ServerConfig):
        texts = [one.name for one in dataclasses.fields(config) if str(one.type).startswith("str")]
        found.append(dataclasses.replace(config(), **dict.fromkeys(texts, folder)))
    found[0] = dataclasses.replace(found[0], speculative_config=json.dumps({"method": "draft_model", "model": folder}))
    shown = json.dumps(public_settings(*found))
    assert str(tmp_path) not in shown
