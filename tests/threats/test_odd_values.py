"""THREATS row E: paths, forms and numbers that no client of good faith would send are 4xx, and the server goes on."""

import random
from urllib.parse import quote

import pytest

from tests.serving.server.running_server import start_server
from tests.threats.conftest import KEYS
from tests.threats.raw_http import ask, status
from tests.tiers import scaled
from tokenmill.config.configs import EngineConfig

# Digits to `str.isdigit`, to `int`, to neither; too many for `int`; bytes that are no UTF-8.
ODD = ["²", "٣", "൪", "①", "१२", "-0", "+1", "1_0", " 1", "1e3", "0x1", "\0", "..", "%", "\ud800", "é" * 300, "'; --"]
NOT_SECONDS = [
    "nan",
    "NaN",
    "-nan",
    "inf",
    "Infinity",
    "-inf",
    "1e400",
    "-1e400",
    "-1",
    "-0.001",
    "1e17",
    "²",
    "",
    "1_0",
]
NAMES = ["file", "purpose", "expires_after", "expires_after[seconds]", "expires_after[anchor]", "purpose[x]", "file[0]",
         "expires_after[", "expires_after[]", "[seconds]", "]", "[", "expires_after[seconds][x]", "", "é"]  # fmt: skip


@pytest.fixture(scope="module")
def server(stub_folder, tmp_path_factory):
    """A server that has all routes."""
    folder = tmp_path_factory.mktemp("batches")
    with start_server(EngineConfig(model=str(stub_folder)), api_key=KEYS[:1], batch_dir=str(folder)) as running:
        running.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield running


@pytest.fixture(scope="module")
def description(server):
    return server.http.get(f"{server.url}/openapi.json").json()


def seeded() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def odd_part(rng: random.Random) -> str:
    """Part of a path, percent-encoded."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice("0123456789") * rng.choice([10, 19, 20, 400, 4301, 5000])
    if kind == 1:
        return quote(rng.randbytes(rng.randrange(1, 20)), safe="")
    return quote("".join(rng.choices(ODD, k=rng.randrange(1, 3))).encode("utf-8", "surrogatepass"), safe="")


def test_no_part_of_a_path_is_the_servers_fault(server, description):
    rng = seeded()
    routes = [(m.upper(), path) for path, methods in description["paths"].items() if "{" in path for m in methods]
    assert {path for _, path in routes} >= {"/engines/{index}/drain", "/v1/files/{file_id}/content"}
    key = f"Authorization: Bearer {KEYS[0]}"
    parts = ["%C2%B2", "9" * 5000, *(odd_part(rng) for _ in range(scaled(10)))]
    for method, path in routes:
        for part in parts:
            asked = path[: path.index("{")] + part + path[path.index("}") + 1 :]
            reply = ask(server.url, method, asked, key, "Content-Type: application/json")
            assert 400 <= status(reply) < 500, (method, asked[:100], reply[-300:])
            assert len(reply) < 2000, "what is sent is not said back at length"


def test_no_form_is_the_servers_fault(server):
    rng = seeded()
    both = [("expires_after", b"1"), ("expires_after[seconds]", b"3600")]
    whole = [("file", b"x"), ("purpose", b"batch")]
    forms = [whole + both, whole + both[::-1], [*whole, ("file[x]", b"y")]]
    for _ in range(scaled(50)):
        names = rng.sample(NAMES, rng.randrange(1, 7))
        values = [rng.choice([b"x", b"batch", b"3600", b"9" * 900, b"\xff", b"", b"nan"]) for _ in names]
        forms.append(list(zip(names, values, strict=True)))
    statuses = []
    for form in forms:
        body = b"".join(
            b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value)
            for name, value in form
        )
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        reply = server.http.post(f"{server.url}/v1/files", content=body + b"--x--\r\n", headers=headers)
        assert reply.status_code in (200, 400), (form, reply.text)
        statuses.append(reply.status_code)
    assert statuses[:3] == [400, 400, 400], "both as a whole and in parts"
    reply = server.http.post(f"{server.url}/v1/files", content=b"--x--\r\n", headers=headers)
    assert reply.status_code == 400


def numbers(schema: dict) -> list[str]:
    """Names of the fields of a body that are numbers."""
    found = schema.get("properties", {})
    return [
        name
        for name, field in found.items()
        for one in field.get("anyOf", [field])
        if one.get("type") in ("number", "integer")
    ]


def test_what_is_no_number_is_refused_wherever_one_is_read(server, description):
    """Query strings and bodies of all routes, as the server itself describes them."""
    num_fields = 0
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            url = server.url + path.replace("{index}", "0").partition("{")[0]
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query" and parameter["schema"].get("type") in ("number", "integer"):
                    num_fields += 1
                    for text in NOT_SECONDS:
                        reply = server.http.request(method, url, params={parameter["name"]: text})
                        assert reply.status_code == 400, (path, parameter, text, reply.text)
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            for name in [] if body is None else references(body["schema"]):
                target = server.url + of_a_session(server, path, name) if "{session_id}" in path else url
                for field in numbers(description["components"]["schemas"][name]):
                    num_fields += 1
                    for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"nan"', "1" + "0" * 400):
                        reply = server.http.request(method, target, content=f'{{"{field}": {text}}}')
                        wanted = 422 if path in ("/embed", "/predict") else 400  # as text-embeddings-inference
                        assert reply.status_code == wanted, (path, field, text, reply.text)
    assert num_fields > 40


def references(schema):
    """Names of the bodies of an operation: one, or several."""
    return [one["$ref"].rsplit("/", 1)[1] for one in schema.get("anyOf", [schema])]


def of_a_session(server, path, body):
    """The path for a session of the kind that takes this body."""
    kind = {"ChatBody": "chat", "TextBody": "text"}[body]
    return path.format(session_id=server.http.post(f"{server.url}/v1/sessions", json={"kind": kind}).json()["id"])


def test_every_time_has_a_least_and_a_most(description):
    schemas = description["components"]["schemas"]
    fields = [
        (where, name, field) for where, one in schemas.items() for name, field in one.get("properties", {}).items()
    ]
    for path, methods in description["paths"].items():
        for operation in methods.values():
            asked = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
            fields += [(path, one["name"], one["schema"]) for one in asked]
    times = [(where, name, field) for where, name, field in fields if name.endswith(("timeout", "seconds"))]
    assert len(times) >= 5
    for where, name, field in times:
        (number,) = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
        assert {"minimum", "exclusiveMinimum"} & set(number) and "maximum" in number, (where, name, field)
