"""THREATS row H: what a client calls its request is a label; nobody mixes with, sees or ends another's by it."""

import json
import re

import pytest

from tests.serving.server.running_server import start_server
from tests.threats.bystander import BODY
from tests.threats.conftest import KEYS
from tokenmill.config.configs import EngineConfig

LABEL = BODY["request_id"]


def test_another_call_of_the_same_name_is_another_call(guarded_server, bystander):
    expected = guarded_server.post("/v1/completions", {"prompt": "something else", "max_tokens": 24}).json()
    for number in range(30):
        body = {"prompt": "something else", "max_tokens": 24, "request_id": LABEL, "stream": number % 3 == 0}
        reply = guarded_server.post("/v1/completions", body, headers={"X-Request-Id": LABEL})
        if not body["stream"]:
            assert reply.json()["choices"] == expected["choices"]
            assert reply.json()["id"] == f"cmpl-{LABEL}"


def test_no_part_and_no_pattern_of_a_name_ends_anything(guarded_server, bystander):
    whole = f"cmpl-{LABEL}"
    names = [whole[:-1], whole + "-", whole + " ", LABEL, whole.upper(), "cmpl-*", "cmpl-%", ".*", "", "cmpl-", "*"]
    for _ in range(10):
        reply = guarded_server.post("/abort_requests", {"request_ids": names})
        assert reply.json() == {"num_aborted": 0, "unknown": names}
    for name in filter(None, names):
        assert guarded_server.http.get(f"{guarded_server.url}/v1/requests/{name}").status_code == 404


def test_ids_that_the_server_makes_cannot_be_guessed(guarded_server):
    found = [guarded_server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["id"] for _ in range(50)]
    stored = [guarded_server.post("/v1/responses", {"input": "x", "max_output_tokens": 1}).json() for _ in range(20)]
    assert all(re.fullmatch(r"cmpl-[0-9a-f]{24}", one) for one in found)
    assert all(re.fullmatch(r"resp_[0-9a-f]{48}", one["id"]) for one in stored)
    for ids, start in ((found, 5), ([one["id"] for one in stored], 5)):
        # 24 random digits share their first four with another's once in 65,536 pairs; a counter or a clock always does.
        assert len({one[start : start + 6] for one in ids}) > len(ids) - 3
    for path in ("/v1/responses/resp_", f"/v1/responses/{stored[0]['id'][:-1]}"):
        assert guarded_server.http.get(guarded_server.url + path).status_code in (404, 405)
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    cancel = f"{guarded_server.url}/v1/responses/{stored[0]['id'][:-1]}/cancel"
    assert guarded_server.http.post(cancel, headers=headers).status_code == 404


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_name_writes_a_line_into_the_log(stub_folder, log_format):
    """Neither one that a client gives, nor what is said of a request that came to nothing."""
    evil = "x\nforged line\x1b[31m\u2028forged line\x85"
    with start_server(
        EngineConfig(model=str(stub_folder)), api_key=KEYS, enable_log_requests=True, log_format=log_format
    ) as server:
        server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        for path, name in (("/v1/completions", "request_id"), ("/v1/embeddings", "request_id"), ("/generate", "rid")):
            body = {"input" if "emb" in path else "text" if name == "rid" else "prompt": "x", name: evil}
            reply = server.post(path, body)
            assert reply.status_code == 400
            assert (
                reply.json()["error"]["message"]
                == f"{name} must be at most 128 visible ASCII characters, without spaces"
            )
        body = {"prompt": "x", "max_tokens": 1, "request_id": "seen", "structured_outputs": {"grammar": evil}}
        server.post("/v1/completions", body)
        messages = [{"role": "user", "content": "x"}]
        kwargs = {evil: evil, "add_generation_prompt": {evil: evil}}
        server.post("/v1/chat/completions", {"messages": messages, "chat_template_kwargs": kwargs, "max_tokens": 1})
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "b\x85".encode()})
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "request_id": "last"})
        logs: list[str] = []

        def says_all() -> bool:
            logs.append(server.output())
            return "cmpl-seen" in logs[-1] and "cmpl-last" in logs[-1] and logs[-1].endswith("\n")

        server.wait_for(says_all)
        for line in logs[-1].splitlines():
            assert line.isprintable()
            assert not line.startswith("forged"), logs[-1]
            if log_format == "json" and line.startswith("{"):
                json.loads(line)
