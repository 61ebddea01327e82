"""THREATS row H: what a client calls its request is a label; nobody mixes with, sees or ends another's by it."""

import re

from tests.threats.bystander import BODY
from tests.threats.conftest import KEYS

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
