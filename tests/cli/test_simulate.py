"""`tokenmill simulate`, `fit` and `plan`: what they print, write and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.loop.test_step_log import record_traffic
from tests.eventually import patience
from tests.lab.simulate.test_step_model import noisy_steps
from tokenmill.cli.main import main
from tokenmill.demo import demo_model_path
from tokenmill.engine.loop.step_log import read_log
from tokenmill.lab.simulate.step_model import fit, read_step_model

TRACE = "".join(
    json.dumps({"timestamp": 50 * i, "input_length": 40 + i, "output_length": 5, "hash_ids": [i % 3]}) + "\n"
    for i in range(40)
)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A trace, a step model, a model."""
    import msgspec

    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "steps.json").write_bytes(msgspec.json.encode(fit(noisy_steps(0.1))))
    model = str(demo_model_path())
    files = [str(tmp_path / "trace.jsonl"), "--step-model", str(tmp_path / "steps.json")]
    return [*files, "--model", model, "--num-pages", "200", "--max-num-seqs", "8"]


def test_policies_are_compared_and_repeat(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags, "--policy", "fair,fcfs", "--data-parallel-size", "2"]) == 0
    first = capsys.readouterr().out
    assert "fair/mixed/whole-prompt  fcfs/mixed/whole-prompt" in first
    assert "fairness (Jain)" in first
    assert main(["simulate", *flags, "--policy", "fair,fcfs", "--data-parallel-size", "2"]) == 0
    assert capsys.readouterr().out == first


def test_json_has_a_line_for_each_combination(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags, "--json", "--batch-policy", "mixed,prefill-first", "--admission", "reserve"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["policies"] for line in lines] == ["fair/mixed/reserve", "fair/prefill-first/reserve"]
    assert all(line["requests"] == 40 and line["errors"] == 0 and line["ttft"]["p50"] > 0 for line in lines)


def test_no_torch_is_imported(flags: list[str]) -> None:
    program = "import sys; from tokenmill.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "simulate", *flags],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(120),
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_a_log_is_fitted_and_its_own_run_comes_out_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness = record_traffic(tmp_path / "log", depth=1)
    assert main(["fit", str(tmp_path / "log"), str(tmp_path / "log"), "-o", str(tmp_path / "steps.json")]) == 0
    assert "in a third that was held out" in capsys.readouterr().out
    assert read_step_model(tmp_path / "steps.json").largest[0] == max(plan.num_tokens for plan in harness.runner.plans)
    assert main(["simulate", str(tmp_path / "log"), "--step-model", "recorded", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["steps"] == len(harness.runner.plans)
    assert outcome["preemptions"] == harness.scheduler.state.num_preemptions
    assert main(["simulate", str(tmp_path / "log"), "--step-model", "recorded", "--num-pages", "9"]) == 2
    assert "a log's own run: without --num-pages" in capsys.readouterr().err


def test_a_simulated_run_leaves_a_step_log_like_a_real_one(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "simulated.log"
    assert main(["simulate", *flags, "--step-log", str(log), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    header, records = read_log(log)
    stored = list(records)
    assert header.num_pages > 0
    assert sum(record.plan is not None for record in stored) == outcome["steps"]
    busy = sum(sum(record.seconds) for record in stored)
    assert busy == pytest.approx(outcome["busy"] * outcome["seconds"])
    assert main(["simulate", str(log), "--step-model", "recorded", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["steps"], again["requests"]) == (outcome["steps"], outcome["requests"])
    assert main(["simulate", *flags, "--step-log", str(log), "--policy", "fair,fcfs"]) == 2
    assert "--step-log holds one run" in capsys.readouterr().err
    assert main(["plan", *flags, "--slo", "ttft_p99<1s", "--step-log", str(log)]) == 2
    assert "leaves no --step-log" in capsys.readouterr().err


def test_a_profile_needs_no_file(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    profile = ["profile:chat", *flags[1:], "--length-scale", "1/16", "--num-prompts", "20", "--json"]
    assert main(["simulate", *profile]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 20
    assert main(["simulate", "profile:chatt", *flags[1:]]) == 2
    assert "did you mean chat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
            "--speculative-config cannot be",
        ),
        (["--kv-disk", "somewhere"], "--kv-disk cannot be simulated"),
        (["--model", "nowhere"], "needs a model's folder or its config.json"),
        (["--max-model-len", "100000"], "exceeds the model's context"),
        (["--policy", "fastest"], "must be one of fair, fcfs, priority"),
        (["--speed", "0"], "must be above 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    flags: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags, *more]) == 2
    assert message in capsys.readouterr().err


def test_steps_beyond_the_model_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"timestamp": 0, "input_length": 60, "output_length": 2, "hash_ids": [i]} for i in range(40)]
    Path(flags[0]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    large = [*flags, "--max-num-seqs", "64", "--max-num-batched-tokens", "4096"]
    assert main(["simulate", *large]) == 2
    assert "2,400 tokens, the step model was fitted to at most" in capsys.readouterr().err
    assert main(["simulate", *large, "--beyond"]) == 0


def test_the_kv_cache_has_a_size(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    place = flags.index("--num-pages")
    without = flags[:place] + flags[place + 2 :]
    assert main(["simulate", *without]) == 2
    assert "say --num-pages or --kv-cache-memory-bytes" in capsys.readouterr().err
    assert main(["simulate", *without, "--kv-cache-memory-bytes", "16m"]) == 0


def test_a_plan_finds_load_and_engines(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    slo = ["--slo", "ttft_p99<300ms,itl_p99<200ms", "--no-noise", "--beyond"]
    assert main(["plan", *flags, *slo]) == 0
    out = capsys.readouterr().out
    assert "1 engines carry" in out
    assert "ttft p99 ms" in out
    assert main(["plan", *flags, *slo, "--find", "engines", "--speed", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["found"]["is_kept"]
    assert document["found"] in document["trials"]
    assert main(["plan", *flags, "--slo", "ttft<1s"]) == 2
    assert "--slo" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_is_drawn(flags: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.svg"
    assert main(["plan", *flags, "--slo", "ttft_p99<300ms", "--no-noise", "--beyond", "--plot", str(picture)]) == 0
    assert "<svg" in picture.read_text()
