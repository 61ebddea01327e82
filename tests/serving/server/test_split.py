"""Prompts computed by one server, continued by another: the answers of one engine, and nothing for who guesses."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.server.split_servers import (
    ASKED,
    PARSERS,
    body_of,
    choices,
    computed_prompt,
    fresh_prompt,
    num_cached,
    start_split,
)
from tests.tiers import scaled, some

PAGE_SIZE = 16


@pytest.fixture(scope="module", params=some(["unix", "tcp"], 1))
def split(request, tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    with start_split(tiny_checkpoint, folder, request.param, server=PARSERS, lease_seconds=10.0) as running:
        yield running


def test_streams_of_every_kind_are_those_of_one_engine(split):
    split.check_streams(16)


@pytest.mark.parametrize("length", [1, 16, 17, 100, 400])
def test_all_full_pages_come_from_the_producer(split, length):
    body = body_of(fresh_prompt(length), logprobs=2, n=2, temperature=0.9, seed=5)
    split.check_pages(body, (length - 1) // PAGE_SIZE * PAGE_SIZE)


def test_requests_as_vllms_proxy_sends_them(split):
    """Its steps, one by one: the reply's parameters go into the next request unchanged."""
    prompt = fresh_prompt()
    headers = {"X-Request-Id": "one-id-for-both"}
    asked = body_of(prompt, stream=False, max_tokens=1, kv_transfer_params=ASKED)
    first = split.prefill.post("/v1/completions", asked, headers=headers).json()
    params = first.get("kv_transfer_params", {})
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert params["remote_num_tokens"] == 96
    assert {"remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port"} <= set(params)
    second = split.decode.post("/v1/completions", body_of(prompt, kv_transfer_params=params), headers=headers)
    assert num_cached(second) == 96
    assert choices(second) == choices(split.prefill.post("/v1/completions", body_of(prompt)))
    assert "kv_transfer_params" not in second.json()


def test_a_handle_gives_nothing_for_another_prompt_or_salt_or_twice(split):
    prompt, other = fresh_prompt(), fresh_prompt()
    params = computed_prompt(split.prefill, prompt)
    split.prefill.wait_for(lambda: split.prefill.metric("num_pages_pinned") > 0)  # told four times a second
    foreign = split.decode.post("/v1/completions", body_of(other, kv_transfer_params=params))
    assert num_cached(foreign) == 0
    assert choices(foreign) == choices(split.prefill.post("/v1/completions", body_of(other)))
    # That was the end of it: the consumer tells the producer that it is done with this handle.
    split.prefill.wait_until_unused()
    again = split.decode.post("/v1/completions", body_of(prompt, kv_transfer_params=params))
    assert num_cached(again) == 0
    params = computed_prompt(split.prefill, prompt)
    salted = split.decode.post("/v1/completions", body_of(prompt, cache_salt="mine", kv_transfer_params=params))
    assert num_cached(salted) == 0
    split.prefill.wait_until_unused()


def test_a_guessed_handle_gives_nothing(split):
    prompt = fresh_prompt()
    params = computed_prompt(split.prefill, prompt)
    for wrong in ({"remote_block_ids": [1, 2, 3, 4]}, {"remote_request_id": "x"}, {"remote_engine_id": "y"}):
        reply = split.decode.post(
            "/v1/completions", body_of(prompt, cache_salt="", max_tokens=2, kv_transfer_params=params | wrong)
        )
        assert reply.status_code == 200
        assert num_cached(reply) in (0, 96)  # the first computes it, so the others find it here
    more = split.decode.post(
        "/v1/completions", body_of(fresh_prompt(), kv_transfer_params=params | {"remote_num_tokens": 1 << 30})
    )
    assert num_cached(more) == 0


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": 1},
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"remote_block_ids": [2**32]},
        {"remote_block_ids": [-1]},
        {"remote_block_ids": [1] * 5},
        {"remote_port": 65536},
        {"remote_port": 10**30},
        {"remote_host": "x" * 300},
        {"no_such_field": 1},
        {"remote_engine_id": {"a": []}},
        {"a": "x" * (1 << 17)},
    ],
)
def test_what_makes_no_sense_is_refused(split, params):
    for server in (split.prefill, split.decode):
        reply = server.post("/v1/completions", body_of([5, 6, 7], kv_transfer_params=params))
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"].startswith("kv_transfer_params")


def test_roles_and_unknown_producers_are_refused_by_name(split):
    there = computed_prompt(split.prefill, fresh_prompt())
    cases = [
        (split.decode, ASKED, "do_remote_decode needs a producer"),
        (split.prefill, there, "do_remote_prefill needs a consumer"),
        (split.decode, there | {"remote_host": "169.254.169.254", "remote_port": 80}, "knows no producer at"),
        (split.decode, there | {"remote_host": "unix:/var/run/docker.sock", "remote_port": 0}, "knows no producer at"),
    ]
    for server, params, why in cases:
        reply = server.post("/v1/completions", body_of(fresh_prompt(), kv_transfer_params=params))
        assert reply.status_code == 400
        assert why in reply.json()["error"]["message"]
    several = split.decode.post("/v1/completions", body_of([[5, 6], [7, 8]], kv_transfer_params=there))
    assert several.status_code == 400 and "of one prompt" in several.json()["error"]["message"]


_NAMES = [*ASKED, "remote_request_id", "remote_num_tokens", "tp_size", "x"]
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=scaled(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(params=st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=9), overrides=st.booleans())
def test_no_parameters_end_an_engine(split, params, overrides):
    """Every client is answered 200 or 400, and the engine lives."""
    if overrides:
        params = {"do_remote_prefill": True, "remote_block_ids": [1, 2, 3, 4], "remote_host": "127.0.0.1"} | params
    for server in (split.prefill, split.decode):
        body = body_of([5, 6, 7], max_tokens=2, kv_transfer_params=params)
        assert server.post("/v1/completions", body).status_code in (200, 400)


def test_after_all_that_nothing_is_left(split):
    for server in (split.prefill, split.decode):
        server.wait_until_unused()
        assert server.http.get(f"{server.url}/health").status_code == 200
        assert "Traceback" not in server.output()
