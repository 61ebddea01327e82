"""Keep what is stored, or can be addressed by an id, for the key that it came by: others are told that it is not
there.

Every route with an id in its path is tried, those of tomorrow among them: who adds one says here what a key can have
there, or why it is everybody's.
"""

import asyncio
import json
import re

import httpx
import pytest

from tests.eventually import patience
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tests.serving.server.test_app import all_routes, make_app
from tests.threats.conftest import KEYS
from tokenmill.config.configs import EngineConfig

# What is the server's, and the same for all that may use it; see docs/serving.md.
EVERYBODYS = {
    "/engines/{index}/drain", "/engines/{index}/remove",
    "/engines/{index}/prefixes/{number}", "/slots/{id_slot}",  # where there are several keys these are refused
    "/api/v0/models/{model:path}",
    "/v1/models/{model:path}",
    "/web/{name}",
}  # fmt: skip
# Which of its ids a key uses there.
OWNED = {
    "/v1/responses/{response_id}": "response",
    "/v1/responses/{response_id}/cancel": "response",
    "/v1/files/{file_id}": "file",
    "/v1/files/{file_id}/content": "file",
    "/v1/batches/{batch_id}": "batch",
    "/v1/batches/{batch_id}/cancel": "batch",
    "/v1/requests/{id}": "request",
    "/v1/requests/{id}/answer_now": "request",
    "/v1/sessions/{session_id}": "session",
    "/v1/sessions/{session_id}/abort": "session",
    "/v1/sessions/{session_id}/input": "session",
}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 400}}
LONG = {"prompt": "x" * 40, "max_tokens": 4000, "ignore_eos": True}


def routes_with_ids():
    return {(method, path) for method, path in all_routes(make_app()) if "{" in path and method != "HEAD"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Slow enough that what one key begins still runs while another looks for it."""
    stub = {"step_seconds": 0.02, "max_model_len": 1_000_000}
    folder = write_folder(tmp_path_factory.mktemp("models") / "echo", byte_level_tokenizer(), config={"stub": stub})
    batches = tmp_path_factory.mktemp("batches")
    flags = {"api_key": KEYS, "batch_dir": str(batches), "reasoning_parser": "qwen3"}
    with start_server(EngineConfig(model=str(folder)), **flags) as running:
        yield running


class Key:
    """A holder of a key, and the ids that it has."""

    def __init__(self, server, key):
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=server.url, headers=headers, timeout=patience())
        self.ids = {}

    def ask(self, method, path, body=None):
        return self.http.request(method, path, json=body if method == "POST" else None)

    def respond(self, **fields):
        body = {"input": "x", "max_output_tokens": 2} | fields
        return self.ask("POST", "/v1/responses", body)


@pytest.fixture
def one(server):
    return Key(server, KEYS[0])


@pytest.fixture
def other(server):
    return Key(server, KEYS[1])


def begin(server, key):
    """One of everything that can be addressed, all of it still there."""
    key.ids["response"] = key.respond(background=True, max_output_tokens=2000).json()["id"]
    files = {"file": ("in.jsonl", json.dumps(LINE) + "\n"), "purpose": (None, "batch")}
    key.ids["file"] = key.http.post("/v1/files", files=files).json()["id"]
    batch = {"input_file_id": key.ids["file"], "endpoint": "/v1/completions", "completion_window": "24h"}
    key.ids["batch"] = key.ask("POST", "/v1/batches", batch).json()["id"]
    key.ids["session"] = key.ask("POST", "/v1/sessions", {}).json()["id"]
    key.ids["request"] = key.ids["response"]
    server.wait_for(lambda: key.ask("GET", f"/v1/requests/{key.ids['request']}").status_code == 200)


def test_every_route_with_an_id_is_somebodys_or_said_to_be_everybodys():
    assert {path for _, path in routes_with_ids()} - EVERYBODYS == OWNED.keys()


def test_what_one_key_has_is_not_there_for_another(server, one, other):
    begin(server, one)
    for method, path in sorted(routes_with_ids()):
        if path in OWNED:
            url = re.sub(r"\{.*?\}", one.ids[OWNED[path]], path)
            reply = other.ask(method, url)
            assert reply.status_code == 404, (method, path, reply.text)
            unknown = re.sub(r"\{.*?\}", "unknown", path)
            assert reply.text == other.ask(method, unknown).text.replace("unknown", one.ids[OWNED[path]])
    # All of it is still there, and unharmed.
    assert one.ask("GET", f"/v1/responses/{one.ids['response']}").json()["status"] in ("queued", "completed")
    for kind, path in (("file", "/v1/files/{}"), ("batch", "/v1/batches/{}"), ("request", "/v1/requests/{}"),
                       ("session", "/v1/sessions/{}")):  # fmt: skip
        assert one.ask("GET", path.format(one.ids[kind])).status_code == 200, kind
    assert one.ask("POST", f"/v1/responses/{one.ids['response']}/cancel").status_code == 200


def test_a_response_is_continued_by_its_owner_only(one, other):
    earlier = one.respond().json()["id"]
    for foreign in (earlier, "resp_unknown"):
        reply = other.respond(previous_response_id=foreign)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "previous_response_id"
    assert one.respond(previous_response_id=earlier).status_code == 200


def test_nobody_ends_anothers_requests_by_any_of_their_names(server, one, other):
    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, headers=dict(one.http.headers), timeout=patience()) as client:
            call = asyncio.ensure_future(client.post("/v1/completions", json=LONG | {"request_id": "mine"}))
            name = "cmpl-mine"
            await asyncio.to_thread(server.wait_for, lambda: one.ask("GET", f"/v1/requests/{name}").status_code == 200)
            inside = [state["id"] for state in one.ask("GET", f"/v1/requests/{name}").json()["requests"]]
            assert inside
            names = [name, *inside]
            reply = other.ask("POST", "/abort_requests", {"request_ids": names})
            assert reply.json() == {"num_aborted": 0, "unknown": names}
            assert not call.done()
            assert one.ask("POST", "/abort_requests", {"request_ids": names}).json()["num_aborted"] == 1
            assert (await call).json()["choices"][0]["finish_reason"] == "abort"

    asyncio.run(scenario())


def test_a_name_that_two_keys_give_is_each_ones_own(server, one, other):
    async def scenario():
        how = {"base_url": server.url, "timeout": patience()}
        clients = [httpx.AsyncClient(headers=dict(key.http.headers), **how) for key in (one, other)]
        body = LONG | {"request_id": "same", "timeout": 60}
        calls = [
            asyncio.ensure_future(client.post("/v1/completions", json=body, timeout=patience())) for client in clients
        ]
        for key in (one, other):
            await asyncio.to_thread(
                server.wait_for, lambda key=key: key.ask("GET", "/v1/requests/cmpl-same").status_code == 200
            )
        for key, call in zip((one, other), calls, strict=True):
            assert not call.done()
            assert key.ask("POST", "/abort_requests", {"request_ids": ["cmpl-same"]}).json()["num_aborted"] == 1
            await call
        for client in clients:
            await client.aclose()

    asyncio.run(scenario())


def test_a_batch_stores_its_responses_for_its_owner(server, one, other):
    line = LINE | {"url": "/v1/responses", "body": {"input": "x", "max_output_tokens": 2}}
    files = {"file": ("in.jsonl", json.dumps(line) + "\n"), "purpose": (None, "batch")}
    file_id = one.http.post("/v1/files", files=files).json()["id"]
    batch = {"input_file_id": file_id, "endpoint": "/v1/responses", "completion_window": "24h"}
    batch_id = one.ask("POST", "/v1/batches", batch).json()["id"]
    server.wait_for(lambda: one.ask("GET", f"/v1/batches/{batch_id}").json()["status"] == "completed")
    output = one.ask("GET", f"/v1/batches/{batch_id}").json()["output_file_id"]
    response_id = one.ask("GET", f"/v1/files/{output}/content").json()["response"]["body"]["id"]
    assert one.ask("GET", f"/v1/responses/{response_id}").status_code == 200
    assert other.ask("GET", f"/v1/responses/{response_id}").status_code == 404
