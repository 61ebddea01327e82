"""THREATS row E: whatever a body holds many of is counted before anything is done with it, and no loop waits for it."""

import asyncio
import json
import random
import threading

import httpx
import pytest

from tests.serving.server.test_app import make_app
from tokenmill.serving.server.http import body as body_module
from tokenmill.serving.server.http.body_threads import INLINE_BYTES
from tokenmill.serving.server.operators.admin import MAX_ABORTS

USER = {"role": "user", "content": "x"}
FUNCTION = {"type": "function", "function": {"name": "f", "arguments": "{}", "parameters": {}}}
CALL = {"id": "c", **FUNCTION}
TEXT = {"type": "text", "text": "x"}
FILE = {"filename": "f", "text": "x"}
NAMED = {"name": "f", "input_schema": {}, "type": "custom"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def chat(**fields):
    return {"messages": [USER]} | fields


def claude(**fields):
    return {"model": "m", "max_tokens": 1, "messages": [USER]} | fields


# Of what a body may hold many: route, the body with so many of it, and more than any model of the test has room for.
MANY = {
    "calls": ("/v1/chat/completions", lambda n: chat(messages=[{"role": "assistant", "tool_calls": [CALL] * n}])),
    "parts": ("/v1/chat/completions", lambda n: chat(messages=[{"role": "user", "content": [TEXT] * n}])),
    "messages": ("/v1/chat/completions", lambda n: chat(messages=[USER] * n)),
    "tools": ("/v1/chat/completions", lambda n: chat(tools=[FUNCTION] * n)),
    "stop strings": ("/v1/chat/completions", lambda n: chat(stop=["x"] * n)),
    "stop ids": ("/v1/completions", lambda n: {"prompt": "x", "stop_token_ids": [1] * n}),
    "allowed ids": ("/v1/completions", lambda n: {"prompt": "x", "allowed_token_ids": [1] * n}),
    "bad words": ("/v1/completions", lambda n: {"prompt": "x", "bad_words": ["x"] * n}),
    "biases": ("/v1/completions", lambda n: {"prompt": "x", "logit_bias": {str(i): 1 for i in range(n)}}),
    "prompts": ("/v1/completions", lambda n: {"prompt": ["x"] * n}),
    "prompts of ids": ("/generate", lambda n: {"input_ids": [[1]] * n}),
    "inputs": ("/v1/embeddings", lambda n: {"input": ["x"] * n}),
    "items": ("/v1/responses", lambda n: {"input": [USER] * n}),
    "parts of items": ("/v1/responses", lambda n: {"input": [{"role": "user", "content": [TEXT] * n}]}),
    "functions": ("/v1/responses", lambda n: {"input": "x", "tools": [FUNCTION] * n}),
    "blocks": ("/v1/messages", lambda n: claude(messages=[{"role": "user", "content": [TEXT] * n}])),
    "uses": ("/v1/messages", lambda n: claude(messages=[{"role": "assistant", "content": [USE] * n}])),
    "named tools": ("/v1/messages", lambda n: claude(tools=[NAMED] * n)),
    "sequences": ("/v1/messages", lambda n: claude(stop_sequences=["x"] * n)),
    "turns to count": ("/v1/messages/count_tokens", lambda n: claude(messages=[USER] * n, max_tokens=1)),
    "files": ("/infill", lambda n: {"input_prefix": "", "input_suffix": "", "input_extra": [FILE] * n}),
    "turns to tokenize": ("/tokenize", lambda n: {"messages": [USER] * n}),
    "pictures": ("/tokenize", lambda n: {"messages": [{"role": "user", "content": [{"type": "image"}] * n}]}),
    "requests": ("/abort_requests", lambda n: {"request_ids": ["x"] * n}),
}


@pytest.mark.parametrize("what", MANY)
def test_too_many_are_refused_whatever_they_are(what):
    """A few too many, and as many as the largest body holds."""
    app = make_app()
    path, body = MANY[what]
    count = random.randrange(MAX_ABORTS + 1, 20_000)
    print(f"count {count}")
    for number in (count, 400_000):
        reply = post(app, path, json.dumps(body(number)))
        assert reply.status_code in (400, 413), reply.text[:300]
        assert len(reply.content) < 1000


def post(app, path, content) -> httpx.Response:
    async def run():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=content, headers={"Content-Type": "application/json"})

    return asyncio.run(run())


def test_no_long_body_is_decoded_or_looked_through_by_the_loop(monkeypatch):
    """On any route that takes JSON, those of tomorrow among them."""
    app = make_app()
    decoders = []
    decode = body_module.decode_body
    monkeypatch.setattr(
        body_module, "decode_body", lambda *given: (decoders.append(threading.current_thread()), decode(*given))[1]
    )
    routes = [
        path
        for path, methods in app.document["paths"].items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
        and path != "/v1/batches"  # it wants a folder
    ]
    assert len(routes) > 10
    opened = post(app, "/v1/sessions", "{}").json()["id"]
    for path in [path.replace("{session_id}", opened) for path in routes]:
        decoders.clear()
        post(app, path, json.dumps({"model": "m", "unknown": "x" * INLINE_BYTES}))
        assert decoders, path
        assert threading.main_thread() not in decoders, path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "x" * INLINE_BYTES}], timeout=0.01)),
        ("/v1/responses", {"input": [{"role": "user", "content": "x" * INLINE_BYTES}], "timeout": 0.01}),
    ],
)
def test_no_long_conversation_is_normalized_by_the_loop(monkeypatch, path, body):
    found = []
    normalize = "tokenmill.serving.server.generation.call.normalize_messages"
    monkeypatch.setattr(normalize, lambda given: (found.append(threading.current_thread()), given)[1])
    assert post(make_app(), path, json.dumps(body)).status_code == 408
    assert found
    assert threading.main_thread() not in found
