"""Recordings: the same code gives the same twice, a change is named, and old and new step logs read alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.recording.scenarios import scenarios
from tools.recording.step_log import normalise
from tools.recordings import compare, record

# One is inline, one overlaps steps.
TWO = "policies.fcfs.mixed.reserve"
REQUESTS = 12
Line = dict[str, Any]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record(folder, seed=1, num_requests=REQUESTS, only=TWO)
    return folder


def changed(folder: Path, into: Path, change: Callable[[list[Line]], None]) -> Path:
    """A copy of a recording; `change` alters the lines of its last scenario."""
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.open(encoding="utf-8")]
        if path.name.endswith("overlap.jsonl"):
            change(lines)
        (into / path.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return into


def test_the_same_code_records_the_same(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, seed=1, num_requests=REQUESTS, only=TWO)
    assert compare(recorded, tmp_path) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary.pop("requests") >= 2 * REQUESTS
    assert summary.pop("steps") > 20
    assert summary.pop("tokens") > 100
    assert summary == {"scenarios": 2, "different": 0}


def test_a_changed_token_is_named(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(lines: list[Line]) -> None:
        line = next(line for line in lines if line.get("outputs"))
        line["outputs"][0]["token_ids"][0] = 1000

    assert compare(recorded, changed(recorded, tmp_path, change)) == 1
    difference, amounts, _ = capsys.readouterr().out.splitlines()
    assert difference.startswith(f"{TWO}.overlap.jsonl: request ")
    assert "outputs 0 token_ids 0: " in difference
    assert difference.endswith(" became 1000")
    assert amounts.startswith("1 of 2 scenarios differ")


def test_a_changed_plan_is_named(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(lines: list[Line]) -> None:
        next(line for line in lines if line.get("step") == 5)["num_scheduled"][0] += 1

    assert compare(recorded, changed(recorded, tmp_path, change)) == 1
    assert "overlap.jsonl: step 5: num_scheduled 0: " in capsys.readouterr().out


def test_a_step_that_is_missing_and_a_scenario_that_is_missing_are_named(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(recorded, tmp_path, list.pop)
    (tmp_path / f"{TWO}.inline.jsonl").unlink()
    assert compare(recorded, tmp_path) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{TWO}.inline.jsonl: only in {recorded}"
    assert second.startswith(f"{TWO}.overlap.jsonl: the file: ")
    assert "entries became" in second


def test_steps_of_one_token_and_ragged_steps_read_alike() -> None:
    plan = {
        "step": 3,
        "request_ids": ["f00", "ba5", "c0de"],
        "rows": [0, 1, 2],
        "num_computed": [0, 4, 9],
        "num_scheduled": [4, 1, 1],
        "page_rows": [0],
        "page_numbers": [2],
        "page_ids": [7],
    }
    new_row = {"row": 0, "request_id": "f00", "token_ids": [5, 6], "seed": 9, "num_prompt_tokens": 2}
    old = [
        {"plan": {**plan, "new_rows": [new_row], "samples": [False, True, True]}, "seconds": [1.0, 2.0, 3.0]},
        {"committed": 3, "token_ids": [-1, 8, -1], "waiting": "for rows"},
    ]
    new = [
        {"plan": {**plan, "new_rows": [new_row], "num_samples": [0, 1, 1]}},
        {"committed": 3, "token_ids": [8], "token_starts": [0, 0, 1, 1]},
    ]
    assert normalise(old) == normalise(new)
    step, outcome = normalise(new)
    assert step["ids"] == [0, 1, 2]
    assert step["new"] == [{"row": 0, "id": 0, "token_ids": [5, 6], "seed": 9}]
    assert step["num_samples"] == [0, 1, 1]
    assert step["pages"] == [[0, 2, 7]]
    assert outcome == {"committed": 3, "sampled": [[0, []], [1, [8]], [2, []]]}
    # Starts without the end of the last one, and a request that brought two tokens.
    ragged = [new[0], {"committed": 3, "token_ids": [8, 9], "token_starts": [0, 0, 2]}]
    assert normalise(ragged)[1]["sampled"] == [[0, []], [1, [8, 9]], [2, []]]


def test_scenarios_have_names_of_their_own_and_cover_every_choice() -> None:
    every = scenarios(0)
    assert len({scenario.name for scenario in every}) == len(every) >= 60
    for name in ("async_scheduling", "enable_prefix_caching", "enable_chunked_prefill"):
        assert {scenario.options[name] for scenario in every} == {True, False}
    for name, choices in (("scheduling_policy", 3), ("batch_policy", 2), ("admission", 3)):
        assert len({scenario.options[name] for scenario in every}) == choices
