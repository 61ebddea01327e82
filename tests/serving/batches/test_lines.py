"""Lines of batch files: what is right and wrong about them, where they stand, and the seed of each."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.batches import lines as module
from tokenmill.serving.batches.lines import Outcome, answered_line, line_body, line_seed, read_lines, unanswered_line

CHAT = "/v1/chat/completions"


def line(custom_id="a", body=None, **fields) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {} if body is None else body} | fields


def read(tmp_path, *given):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in given))
    return read_lines(path, CHAT), path.read_bytes()


def test_each_line_is_found_where_it_stands(tmp_path):
    given = [line("a"), b"", line("ü", {"model": None}), b"   ", line("c"), b"\r"]
    lines, raw = read(tmp_path, *given)
    assert not lines.faults
    assert [(place.number, place.custom_id) for place in lines.places] == [(1, "a"), (3, "ü"), (5, "c")]
    for place, one in zip(lines.places, (given[0], given[2], given[4]), strict=True):
        assert json.loads(raw[place.offset :][: place.size]) == one


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (line(body=[]), "invalid_json_line", None),
        (line(extra=1), "invalid_json_line", None),
        ({"custom_id": "b", "method": "POST", "url": CHAT}, "invalid_json_line", None),
        (line(custom_id=7), "invalid_json_line", None),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (line("first", {"model": "m"}), "duplicate_custom_id", "custom_id"),
        (line("b", {"model": "m"}, method="GET"), "invalid_method", "method"),
        (line("b", {"model": "m"}, url="/v1/completions"), "mismatched_endpoint", "url"),
        (line("b", {"model": "m"}, url=None), "mismatched_endpoint", "url"),
        (line("b", {"model": "other"}), "mismatched_model", "body.model"),
        (line("b"), "mismatched_model", "body.model"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(tmp_path, wrong, code, param):
    lines, _ = read(tmp_path, line("first", {"model": "m"}), wrong, line("last", {"model": "m"}))
    assert [(fault.code, fault.line, fault.param) for fault in lines.faults] == [(code, 2, param)]


def test_a_file_without_lines_is_none(tmp_path):
    assert read(tmp_path, b"", b" ")[0].faults[0].code == "empty_file"


def test_lines_are_limited_in_number_and_length_and_faults_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINES", 3)
    assert not read(tmp_path, *(line(str(i)) for i in range(3)))[0].faults
    assert [fault.code for fault in read(tmp_path, *(line(str(i)) for i in range(5)))[0].faults] == ["too_many_tasks"]
    monkeypatch.setattr(module, "MAX_LINES", 1000)
    assert len(read(tmp_path, *[b"{"] * 500)[0].faults) == module.MAX_FAULTS
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    lines, _ = read(tmp_path, line("a"), line("b", {"x": "y" * 100}), line("c"))
    assert [(fault.code, fault.line) for fault in lines.faults] == [("line_too_long", 2)]


@given(
    body=st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.none() | st.lists(st.integers())),
    indent=st.sampled_from([None, 1]),
)
def test_a_body_is_what_it_was_and_a_seed_where_it_has_none(body, indent):
    for taken in ("stream", "background", "model"):
        body.pop(taken, None)
    raw = json.dumps(line("x", body), indent=indent).encode()
    sent = json.loads(line_body(raw, "batch_1"))
    seed = body.get("seed")
    assert sent == body | {"seed": line_seed("batch_1", "x") if seed is None else seed}


def test_a_vector_needs_no_seed():
    assert json.loads(line_body(json.dumps(line("x", {"input": "a"}, url="/v1/embeddings")).encode(), "b")) == {
        "input": "a"
    }


def test_seeds_depend_on_batch_and_line_alone():
    names = [("b", "1"), ("b", "2"), ("c", "1"), ("b", "\ud800")]
    seeds = [line_seed(*name) for name in names]
    assert len(set(seeds)) == len(names)
    assert seeds == [line_seed(*name) for name in names]
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("name", ["stream", "background"])
def test_what_a_line_cannot_have_is_refused_by_name(name):
    with pytest.raises(InvalidRequest, match=name):
        line_body(json.dumps(line("x", {name: True})).encode(), "b")


def test_output_lines_are_those_of_openai():
    good = json.loads(answered_line("batch_req_1", "x", 200, b'{"a": [1, 2]}'))
    response = {"status_code": 200, "request_id": "batch_req_1", "body": {"a": [1, 2]}}
    assert good == {"id": "batch_req_1", "custom_id": "x", "response": response, "error": None}
    late = unanswered_line("x\n", Outcome.EXPIRED)
    assert late.count(b"\n") == 1 and late.endswith(b"\n")
    late = json.loads(late)
    assert (late["custom_id"], late["response"], late["error"]["code"]) == ("x\n", None, "batch_expired")
