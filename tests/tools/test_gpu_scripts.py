"""The scripts of a GPU's first minutes, dry: they say all that they promise, as lines and as JSON last."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tools.gpu import fp8_check, mixtures, profile_step, sweep_attention
from tools.gpu.benchmarks import Rates
from tools.gpu.engine_checks import check_names
from tools.gpu.kernel_times import Cost, kernel_rows, kinds_of
from tools.gpu.rows import Row, Rows, guarded

from tests.house.source_tree import ROOT

pytest.importorskip("triton", reason="triton is not installed")


def found(output: str) -> dict[str, Any]:
    """The last line, whose rows are the lines before."""
    lines = output.splitlines()
    report: dict[str, Any] = json.loads(lines[-1])
    assert len(lines) == 1 + len(report["rows"])
    return report


def test_a_step_is_profiled_from_start_to_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_step.main(["--device", "cpu"]) == 0
    report = found(capsys.readouterr().out)
    assert report["is_complete"]
    rows = report["rows"]
    seen = {name for row in rows for name in row}
    assert {"copy_gb_per_s", "loading weights", "capturing graphs", "warming up", "kv_mib", "replay_ms"} <= seen
    assert {"launch_ms", "engine_step_ms", "step_ms", "kind", "kernel", "calls", "of_floor"} <= seen
    assert len([row for row in rows if row["what"].startswith("sampler") and row["us"] > 0]) == 3
    head = next(row for row in rows if row.get("kind") == "head")
    assert head["calls"] == 1
    assert head["gb_per_s"] > 0


def test_the_sweep_compares_and_ranks_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_attention.main(["--device", "cpu"]) == 0
    rows = found(capsys.readouterr().out)["rows"]
    assert (rows[0]["cases"], rows[0]["of_them_failed"]) == (2 + 2, 0)
    for shape in sweep_attention.DRY_SHAPES:
        own = [row for row in rows if row["what"] == shape.name]
        tried = [row for row in own if "rank" not in row]
        assert all(row["passed"] for row in tried)
        assert tried[0]["case"] == "the engine's own"
        assert len(tried) == 3
        ranked = [row["us"] for row in own if "rank" in row]
        assert ranked == sorted(row["us"] for row in tried)[: len(ranked)]


def test_cases_near_the_engines_own_come_first() -> None:
    found = sweep_attention.cases(sweep_attention.DECODE, sweep_attention.DECODE_CHOICES)
    assert len(found) == len(set(found)) == 3 * 3 * 3 * 3 * 2
    assert found[0] == sweep_attention.DECODE
    distances = [sum(getattr(case, name) != getattr(found[0], name) for name in case.__slots__) for case in found]
    assert distances == sorted(distances)


def test_a_case_overrides_what_the_engine_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.model.kernels.triton import attention

    launched = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: launched.append((grid, args, options))

    kernel, rows = Kernel(), attention.PROMPT_ROWS
    monkeypatch.setattr(attention, "_attend", kernel)
    with sweep_attention.overriding(sweep_attention.Case(4, 32, 2, 16, 64, False)):
        attention._attend[(7,)]("q", TILE=64, ROWS=128, HEADS_FIRST=True, num_warps=8)
        assert attention.PROMPT_ROWS == 64
    own = {"TILE": 32, "ROWS": 128, "HEADS_FIRST": False, "num_warps": 2, "num_stages": 4}
    assert launched == [((7,), ("q",), own)]
    assert (attention._attend, attention.PROMPT_ROWS) == (kernel, rows)


def test_fp8_products_are_compared_with_float64(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8_check.main(["--device", "cpu", "--seconds", "240"]) == 0
    rows = found(capsys.readouterr().out)["rows"]
    assert [row["what"].partition(",")[0] for row in rows] == ["fp8 experts"] * 2 + ["fp8 product"] * 2
    # A product of weights and rows, each rounded; experts have two with a gate between, of a handful of numbers.
    most = {"fp8 experts": 0.25, "fp8 product": 0.1}
    assert all(0 < row["error"] < row["with_rounding"] < most[row["what"].partition(",")[0]] for row in rows)


def test_a_wrong_product_fails_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (fp8_check, mixtures):
        monkeypatch.setattr(module, "LARGEST_ERROR", 1e-12)
    assert fp8_check.main(["--device", "cpu", "--seconds", "240"]) == 1
    assert not any(row["passed"] for row in found(capsys.readouterr().out)["rows"])


def test_the_head_is_the_last_product_with_what_adds_up_its_parts() -> None:
    names = [
        "_rms_norm",
        "nvjet_tst_64x8",
        "_attend",
        "join_splits",
        "sm90_xmma_gemm_bf16",
        "cublasLt::splitKreduce_kernel",
    ]
    names += ["_gated", "nvjet_tst_128x8", "cublasLt::splitKreduce_kernel", "_draw"]
    kinds = ["rest", "products", "attention", "attention", "products", "products", "rest", "head", "head", "rest"]
    assert kinds_of([(name, 1.0) for name in names]) == kinds
    rates = Rates(copy_bytes=1e12, operations=1e15)
    rows = list(kernel_rows("step", [(name, 2.0) for name in names], {"head": Cost(2e6, 1e6)}, rates))
    head = next(row for row in rows if row.get("kind") == "head")
    assert (head["calls"], head["us"]) == (2, 4.0)
    assert head["gb_per_s"] == pytest.approx(500)
    assert head["of_floor"] == pytest.approx(0.5)


def test_a_part_that_breaks_leaves_its_rows_and_the_next_part(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks() -> Iterator[Row]:
        yield {"what": "first"}
        raise RuntimeError("no such kernel")

    with Rows(60) as rows:
        rows.take(guarded("broken", breaks()))
        rows.take([{"what": "second"}])
    report = found(capsys.readouterr().out)
    assert [row.get("what", row.get("check")) for row in report["rows"]] == ["first", "broken", "second"]
    assert "no such kernel" in report["rows"][1]["detail"]
    assert rows.has_failed


def test_no_row_is_asked_for_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    def endless() -> Iterator[Row]:
        while True:
            time.sleep(0.02)
            yield {"what": "again"}

    with Rows(0.1) as rows:
        rows.take(endless())
    report = found(capsys.readouterr().out)
    assert not report["is_complete"]
    assert report["rows"]


def test_the_commands_of_the_first_minutes_can_be_given_as_they_stand() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    before, *commands = re.findall(r"<!-- first minutes: .+? -->\n```sh\n(.+?)```", text, re.DOTALL)
    assert len(commands) == 5
    for command in commands:
        whole = before + command
        assert len(whole) <= 2000
        done = subprocess.run(["bash", "-n"], input=whole, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert seconds_of(command) <= 9 * 60
        for module in re.findall(r"python3 -m (tools\S+)", command):
            assert importlib.util.find_spec(module) is not None
        for name in re.findall(r"one \d+ engine (\S+?)[;\s]", command):
            assert name in check_names(is_dry=False)
        for seconds, own in re.findall(r"(?:timeout|one) (\d+) .*? --seconds (\d+)", command):
            assert int(own) < int(seconds), "it ends by itself, with its report"


def seconds_of(command: str) -> int:
    """The longest that a command takes: loops as often as they turn, what runs beside it not at all."""
    total = 0
    for line in command.splitlines():
        beside, _, behind = line.rpartition("& S=$!;")
        turns = len(re.findall(r"\S+", (re.match(r"for \w+ in (.*?);", line) or ["", "x"])[1]))
        calls = 2 if line.startswith("n()") else turns
        own = behind if beside else "" if line.endswith("& K=$!") else line
        total += calls * sum(map(int, re.findall(r"(?:timeout|one|-sm) (\d+)", own)))
    return total
