import csv
import json
import random
import statistics

import numpy as np
import pytest

from tokenmill.cli.main import main
from tokenmill.core.errors import InvalidConfig
from tokenmill.lab.bench.offline import Trace
from tokenmill.lab.bench.report import distribution, percentile
from tokenmill.lab.bench.workload import (
    PROFILES,
    LogNormalLengths,
    UniformLengths,
    Workload,
    arrival_times,
    read_lengths,
)

SMALL = ("--dtype", "float32", "--num-pages", "96", "--max-num-seqs", "8")


@pytest.fixture
def seed() -> int:
    value = random.randrange(2**31)
    print(f"seed {value}")
    return value


def bench(capsys, *arguments: str) -> dict:
    assert main(["bench", *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_throughput_counts_what_it_asked_for(tiny_model, capsys, tmp_path):
    picture, table, raw = tmp_path / "out.png", tmp_path / "figures.csv", tmp_path / "steps.csv"
    document = bench(
        capsys, "throughput", "--model", str(tiny_model), "--num-prompts", "12", "--input-len", "3:30", "--prefix-len",
        "2", "--output-len", "5:9", "--repeats", "2", "--seed", "4", "--plot", str(picture), "--csv", str(table),
        "--samples", str(raw), *SMALL,
    )  # fmt: skip
    for repeat, run in enumerate(document["runs"]):
        prompts = Workload(12, UniformLengths(3, 30), UniformLengths(5, 9), 4, 2).draw(330, repeat)
        assert run["input_tokens"] == sum(len(prompt.token_ids) for prompt in prompts)
        assert run["output_tokens"] == sum(prompt.output_len for prompt in prompts)
        assert run["output_tokens_per_second"] == pytest.approx(run["output_tokens"] / run["seconds"])
        assert run["steps"] >= 9
    rates = [run["output_tokens_per_second"] for run in document["runs"]]
    assert document["output_tokens_per_second"] == statistics.median(rates)
    assert document["engine"]["num_pages"] == 96
    assert document["machine"]["peak_memory_bytes"] > 2**26
    assert picture.read_bytes().startswith(b"\x89PNG")
    figures = {row["figure"]: row for row in csv.DictReader(table.open())}
    rate = figures["output_tokens_per_second"]
    assert [float(rate[name]) for name in ("value", "low", "high")] == [statistics.median(rates), *sorted(rates)]
    assert figures["peak_memory_bytes"]["low"] == ""
    steps = list(csv.DictReader(raw.open()))
    for number, run in enumerate(document["runs"], 1):
        own = [step for step in steps if step["run"] == str(number)]
        assert [int(step["step"]) for step in own] == list(range(1, len(own) + 1))
        assert sum(int(step["output_tokens"]) for step in own) == run["output_tokens"]
        assert sum(float(step["seconds"]) for step in own) == pytest.approx(run["seconds"])
        assert own[0]["phase"] == "prefill"


def test_latency_measures_every_point(tiny_model, capsys, tmp_path):
    picture, raw = tmp_path / "out.svg", tmp_path / "steps.jsonl"
    document = bench(
        capsys, "latency", "--model", str(tiny_model), "--batch-size", "1,3", "--input-len", "8,40", "--output-len",
        "6", "--num-iters", "2", "--plot", str(picture), "--samples", str(raw), *SMALL,
    )  # fmt: skip
    points = document["points"]
    assert [(point["batch_size"], point["input_len"]) for point in points] == [(1, 8), (3, 8), (1, 40), (3, 40)]
    for point in points:
        prefill, step = point["prefill_seconds"], point["decode_step_seconds"]
        assert 0 < prefill["lowest"] <= prefill["median"] <= prefill["highest"]
        assert 0 < step["lowest"] <= step["median"] <= step["highest"]
        assert point["decode_tokens_per_second"] == pytest.approx(point["batch_size"] / step["median"])
    # Without the fonts' shapes, matplotlib leaves a text as a comment.
    drawn = picture.read_text()
    assert "<svg" in drawn
    assert "tiny (float32), batches of 1, 3 requests, 2 of each" in drawn
    steps = [json.loads(line) for line in raw.read_text().splitlines()]
    for point in points:
        own = [
            step
            for step in steps
            if (step["batch_size"], step["input_len"]) == (point["batch_size"], point["input_len"])
        ]
        assert {step["batch"] for step in own} == {1, 2}
        decode = [step["seconds"] for step in own if step["phase"] == "decode"]
        assert statistics.fmean(decode) == pytest.approx(point["decode_step_seconds"]["mean"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["throughput", "--repeats", "0"], "--repeats must be at least 1"),
        (["throughput", "--input-len", "9:3"], "--input-len must rise"),
        (["throughput", "--input-len", "x"], "--input-len must be a number or LOW:HIGH"),
        (["throughput", "--profile", "chta"], "did you mean chat?"),
        (["throughput", "--profile", "chat", "--input-len", "3"], "--profile brings lengths of its own"),
        (["throughput", "--length-scale", "1/16"], "--length-scale needs a --profile"),
        (["throughput", "--profile", "chat", "--length-scale", "1/0"], "--length-scale must be above 0"),
        (["throughput", "--plot", "picture.docx"], "--plot: the name must end with one of"),
        (["throughput", "--plot", "no/such/folder/x.png"], "--plot: there is no folder no/such/folder"),
        (["throughput", "--samples", "steps.txt"], "--samples: the name must end with .csv or .jsonl"),
        (["throughput", "--csv", "figures.jsonl"], "--csv: the name must end with .csv"),
        (["latency", "--samples", "no/such/folder/x.csv"], "--samples: there is no folder no/such/folder"),
        (["latency", "--samples", "x.csv", "--csv", "./x.csv"], "--samples and --csv name the same file"),
        (["latency", "--batch-size", "1,,2"], "--batch-size must be one or more whole numbers"),
        (["latency", "--output-len", "1"], "--output-len must be at least 2"),
        (["latency", "--batch-size", "300"], "--batch-size 300 exceeds --max-num-seqs 256"),
        (["serve", "--request-rate", "0"], "--request-rate must be above 0"),
        (["serve", "--request-rate", "nan"], "--request-rate must be above 0"),
        (["serve", "--burstiness", "0"], "--burstiness must be above 0"),
        (["serve", "--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["serve", "--num-prompts", "-1"], "--num-prompts must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(arguments, message, capsys):
    assert main(["bench", *arguments]) == InvalidConfig.exit_code
    assert message in capsys.readouterr().err


def test_lengths_beyond_the_context_are_refused(tiny_model, capsys):
    assert main(["bench", "throughput", "--model", str(tiny_model), "--input-len", "600", *SMALL]) == 2
    assert "lengths of up to 664 tokens exceed the context of 512" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "latency", "--plot", "out.png"]) == 2
    assert "--plot needs matplotlib: pip install 'tokenmill[plot]'" in capsys.readouterr().err


def test_the_kind_must_be_named(capsys):
    assert main(["bench"]) == 2
    assert "latency" in capsys.readouterr().err
    assert main(["bench", "--help"]) == 0
    assert "throughput" in capsys.readouterr().out


def test_a_trace_ends_its_prefill_with_the_last_first_token():
    trace = Trace([1.0, 3.0, 4.0, 4.5], [1, 3, 5, 7], prefill_steps=2)
    assert (trace.prefill_seconds, trace.seconds) == (3.0, 4.5)
    assert trace.decode_step_seconds == [1.0, 0.5]


def test_percentiles_are_numpys(seed):
    source = random.Random(seed)
    for size in (1, 2, 3, 50):
        samples = [source.expovariate(1) for _ in range(size)]
        for percent in (0, 37.5, 50, 99, 100):
            assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent))
    assert distribution([]) is None


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_arrivals_have_the_asked_rate_and_variation(variation, seed):
    times = list(arrival_times(40_000, rate=8.0, variation=variation, seed=seed))
    gaps = np.diff(times)
    assert times[0] == 0.0
    # Five standard deviations of the estimates; that of the variation by the fourth moment of the Gamma law.
    assert gaps.mean() == pytest.approx(1 / 8, rel=5 * variation / 200)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.15)


def test_an_unlimited_rate_sends_everything_at_once():
    assert list(arrival_times(3, float("inf"), 1.0, seed=0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_scales_without_changing_its_shape(name, seed):
    for law in (PROFILES[name].input_len, PROFILES[name].output_len):
        full = [law.draw(random.Random(f"{seed} {number}")) for number in range(2000)]
        short = [law.scaled(1 / 4).draw(random.Random(f"{seed} {number}")) for number in range(2000)]
        assert max(full) <= law.high
        assert all(abs(max(1, whole / 4) - part) <= 0.75 for whole, part in zip(full, short, strict=True))


def test_the_chat_profile_is_near_the_trace(seed):
    source = random.Random(seed)
    outputs = [PROFILES["chat"].output_len.draw(source) for _ in range(20_000)]
    # Published: mean 211, half of them up to 129, none above 1000.
    assert statistics.fmean(outputs) == pytest.approx(211, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(np.exp(5.02), rel=0.05)
    assert max(outputs) == 1000


def test_the_same_seed_gives_the_same_requests_and_each_repeat_others(seed):
    workload = Workload(5, read_lengths("--input-len", "3:9"), LogNormalLengths(2.0, 1.0, 30), seed, prefix_len=4)
    assert workload.draw(50) == workload.draw(50)
    assert workload.draw(50) != workload.draw(50, repeat=1)
    prefixes = {tuple(prompt.token_ids[:4]) for prompt in workload.draw(50)}
    assert len(prefixes) == 1
    assert workload.longest == 4 + 9 + 30


def test_a_kind_that_is_not_there_is_answered_with_the_one_that_was_meant(capsys):
    assert main(["bench", "throughptu"]) == 2
    assert "unknown kind 'throughptu'; did you mean throughput?" in capsys.readouterr().err
    assert main(["bench"]) == 2
    assert "unknown kind" not in capsys.readouterr().err
