"""`bench compare`: verdicts follow from the figures and their ranges, and what is not comparable is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenmill.cli.main import main
from tokenmill.lab.bench.report import distribution, distribution_of_requests

MACHINE = {"tokenmill": "0.1.0", "torch": "2.0", "processor": "one", "load_average": 0.5, "peak_memory_bytes": 2**20}
LENGTHS = {"low": 6, "high": 64}


def throughput(*rates: float, **machine: Any) -> dict[str, Any]:
    ordered = sorted(rates)
    median = ordered[len(ordered) // 2]
    return {
        "benchmark": "throughput",
        "output_tokens_per_second": median,
        "total_tokens_per_second": 2 * median,
        "workload": {"num_prompts": 8, "input_len": LENGTHS, "output_len": LENGTHS, "prefix_len": 0, "seed": 0},
        "engine": {"model": "some/model", "dtype": "float32", "seconds": {"loading": rates[0]}},
        "machine": MACHINE | machine,
        "runs": [{"output_tokens_per_second": rate, "total_tokens_per_second": 2 * rate} for rate in rates],
    }


def latency(scale: float) -> dict[str, Any]:
    times = {"median": 0.2 * scale, "lowest": 0.19 * scale, "highest": 0.21 * scale}
    return throughput(1.0) | {
        "benchmark": "latency",
        "workload": {"batch_sizes": [4], "input_lens": [32], "output_len": 9, "num_iters": 3},
        "points": [
            {
                "batch_size": 4,
                "input_len": 32,
                "prefill_seconds": times,
                "prefill_tokens_per_second": 640 / scale,
                "decode_step_seconds": times | (distribution([times["median"]] * 20) or {}),
                "decode_tokens_per_second": 20 / scale,
            }
        ],
    }


def load(samples: list[float], errors: int = 0) -> dict[str, Any]:
    figures = distribution_of_requests(samples)
    workload = throughput(1.0)["workload"]
    return {
        "benchmark": "serve",
        "requests_per_second": 3.0,
        "output_tokens_per_second": 30.0,
        "total_tokens_per_second": 60.0,
        **{f"{name}_seconds": figures for name in ("ttft", "time_per_output_token", "e2e")},
        "inter_token_seconds": distribution(samples),
        "errors": {"status 500": errors} if errors else {},
        "workload": workload | {"request_rate": 4.0, "max_concurrency": 2, "profile": None, "length_scale": "1"},
        "server": {"url": "http://server", "model": "tiny"},
        "machine": MACHINE,
    }


@pytest.fixture
def compare(tmp_path, capsys):
    """Writes the documents, A.json and so on; returns the exit code and what was printed."""

    def ask(*documents: dict[str, Any], flags: tuple[str, ...] = ("--json",)) -> tuple[int, str, str]:
        paths = [tmp_path / f"{letter}.json" for letter, _ in zip("ABCD", documents, strict=False)]
        for path, document in zip(paths, documents, strict=True):
            path.write_text(json.dumps(document))
        # The seed of `rng` among others.
        capsys.readouterr()
        code = main(["bench", "compare", *map(str, paths), *flags])
        return code, *capsys.readouterr()

    return ask


def verdicts(printed: str, figure: str) -> list[tuple[str, bool]]:
    entries = json.loads(printed)["figures"][figure][1:]
    return [(entry["verdict"], entry["spread_known"]) for entry in entries]


def test_a_rate_beyond_the_spread_is_better_or_worse_and_one_within_it_neither(compare, rng):
    base = rng.uniform(10, 1000)
    first = throughput(base, base * 1.1, base * 0.9)
    faster = throughput(*(base * factor for factor in (1.2, 1.3, 1.4)))
    slower = throughput(*(base * factor for factor in (0.5, 0.89, 0.6)))
    near = throughput(*(base * factor for factor in (1.05, 1.3, 1.4)))
    code, printed, _ = compare(first, faster, slower, near)
    assert code == 0
    for figure in ("output_tokens_per_second", "total_tokens_per_second"):
        assert verdicts(printed, figure) == [("better", True), ("worse", True), ("within_spread", True)]
        values = json.loads(printed)["figures"][figure]
        assert "ratio" not in values[0]
        assert [entry["ratio"] for entry in values[1:]] == pytest.approx([1.3, 0.6, 1.3])


def test_less_memory_and_fewer_errors_are_better(compare):
    _, printed, _ = compare(throughput(9.0, 8.0), throughput(9.0, 8.0, peak_memory_bytes=2**19))
    assert verdicts(printed, "peak_memory_bytes") == [("better", False)]
    assert verdicts(printed, "output_tokens_per_second") == [("equal", True)]
    _, printed, _ = compare(load([1.0, 2.0]), load([1.0, 2.0], errors=2))
    assert verdicts(printed, "errors") == [("worse", False)]
    assert json.loads(printed)["figures"]["errors"][1]["ratio"] is None


def test_a_single_run_leaves_a_question_mark(compare):
    _, printed, _ = compare(throughput(10.0), throughput(30.0), flags=())
    assert "3.000x  better?" in printed
    assert "the effect of chance is unknown" in printed
    assert "within spread" not in printed
    # One run inside the range of several says no more.
    _, printed, _ = compare(throughput(10.0, 11.0, 14.0), throughput(13.0))
    assert verdicts(printed, "output_tokens_per_second") == [("within_spread", False)]


def test_shorter_times_are_better_and_their_rates_follow(compare):
    _, printed, _ = compare(latency(1.0), latency(0.5), latency(1.04))
    for figure in ("prefill_seconds", "decode_step_seconds", "prefill_tokens_per_second", "decode_tokens_per_second"):
        assert verdicts(printed, f"4 x 32 {figure}") == [("better", True), ("within_spread", True)], figure


def test_percentiles_of_a_server_are_held_to_the_intervals_of_their_samples(compare, rng):
    first = [rng.uniform(1.0, 2.0) for _ in range(400)]
    _, printed, _ = compare(load(first), load([value * 1.02 for value in first]), load([value * 2 for value in first]))
    assert verdicts(printed, "ttft_p50_seconds") == [("within_spread", True), ("worse", True)]
    assert verdicts(printed, "e2e_mean_seconds") == [("within_spread", True), ("worse", True)]
    # Pieces come many from one moment.
    assert verdicts(printed, "inter_token_p50_seconds") == [("worse", False)] * 2
    # A document of a version that wrote no intervals.
    old = load([value * 2 for value in first])
    del old["ttft_seconds"]["intervals"]
    _, printed, _ = compare(load(first), old)
    assert verdicts(printed, "ttft_p50_seconds") == [("worse", False)]


def test_few_samples_bound_no_high_percentile(compare):
    interval = (distribution_of_requests([float(value) for value in range(20)]) or {})["intervals"]
    assert interval["p99"][1] is None
    assert interval["p50"] == [4.0, 15.0]
    # What lies above the samples of twenty may still be the p99 of them; what lies below cannot.
    slow, fast = [5.0 + value for value in range(20)], [float(value) / 100 for value in range(20)]
    _, printed, _ = compare(load(fast), load(slow))
    assert verdicts(printed, "ttft_p99_seconds") == [("within_spread", True)]
    assert verdicts(printed, "ttft_p50_seconds") == [("worse", True)]
    _, printed, _ = compare(load(slow), load(fast * 100))
    assert verdicts(printed, "ttft_p99_seconds") == [("better", True)]


def test_intervals_hold_the_true_percentile_nineteen_times_of_twenty(rng):
    held = {"p50": 0, "p90": 0, "mean": 0}
    true = {"p50": 0.5, "p90": 0.9, "mean": 0.5}
    repeats = 300
    for _ in range(repeats):
        found = (distribution_of_requests([rng.random() for _ in range(120)]) or {})["intervals"]
        for name, value in true.items():
            low, high = found[name]
            held[name] += low <= value <= (1.0 if high is None else high)
    # 95% of 300 are 285 with a deviation of 3.8; the ranks are rounded outwards.
    assert all(count >= 260 for count in held.values()), held


def test_where_machines_and_versions_differ_is_said(compare):
    other = throughput(20.0, 21.0, torch="2.1", load_average=7.0)
    other["engine"] |= {"dtype": "bfloat16", "page_size": 8}
    _, printed, _ = compare(throughput(10.0, 11.0), other)
    assert json.loads(printed)["differences"] == {
        "engine.dtype": ["float32", "bfloat16"],
        "engine.page_size": [None, 8],
        "machine.torch": ["2.0", "2.1"],
    }
    _, printed, _ = compare(throughput(10.0, 11.0), other, flags=())
    assert ["machine.torch", "2.0", "2.1"] in [line.split() for line in printed.splitlines()]
    _, printed, _ = compare(throughput(10.0, 11.0), throughput(20.0, 21.0), flags=())
    assert "differ" not in printed


def test_other_kinds_and_workloads_are_refused_unless_forced(compare):
    longer = throughput(20.0, 21.0)
    longer["workload"] = longer["workload"] | {"output_len": {"low": 6, "high": 128}}
    code, printed, said = compare(throughput(10.0, 11.0), longer)
    assert (code, printed) == (2, "")
    assert "B.json are of different workloads: workload.output_len.high is 64 and 128; --force" in said
    code, _, said = compare(throughput(10.0), throughput(10.0), latency(1.0))
    assert code == 2
    assert "C.json are of different kinds: benchmark is 'throughput' and 'latency'" in said
    code, printed, _ = compare(throughput(10.0, 11.0), longer, latency(1.0), flags=("--force", "--json"))
    assert code == 0
    figures = json.loads(printed)["figures"]
    assert figures["output_tokens_per_second"][1]["verdict"] == "better"
    assert figures["output_tokens_per_second"][2] is None
    assert figures["4 x 32 prefill_seconds"][:2] == [None, None]
    code, printed, _ = compare(throughput(10.0, 11.0), latency(1.0), flags=("--force",))
    assert code == 0
    assert ["4", "x", "32", "prefill_seconds", "-", "200", "ms", "-"] in [line.split() for line in printed.splitlines()]


def test_the_last_line_of_a_log_will_do(tmp_path, capsys):
    log, pretty = tmp_path / "run.log", tmp_path / "pretty.json"
    log.write_text(f"run 1: 10 output tokens/s\n{json.dumps(throughput(10.0, 12.0))}\n\n")
    pretty.write_text(json.dumps(throughput(10.0, 12.0), indent=2))
    assert main(["bench", "compare", str(log), str(pretty), "--json"]) == 0
    assert verdicts(capsys.readouterr().out, "total_tokens_per_second") == [("equal", True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither it nor its last line is a document"),
        ("run 1: 10 tokens/s", "neither it nor its last line is a document"),
        ("[1]", "neither it nor its last line is a document"),
        ("{}", "neither it nor its last line is a document"),
        ('{"benchmark": "throughput"}', "its document of bench is not whole"),
        ('{"benchmark": ["serve"]}', "its document of bench is not whole"),
        (json.dumps(throughput(1.0) | {"runs": [{"output_tokens_per_second": "x"}]}), "is not whole"),
        (json.dumps(throughput(1.0) | {"machine": None}), "is not whole"),
        (json.dumps(throughput(1.0) | {"benchmark": "peers"}), "is not whole"),
    ],
)
def test_a_file_without_a_whole_document_is_refused_by_name(text, message, tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(throughput(1.0)))
    bad.write_text(text)
    assert main(["bench", "compare", str(good), str(bad)]) == 2
    said = capsys.readouterr().err
    assert str(bad) in said
    assert message in said
    assert len(said.splitlines()) == 1


def test_files_that_cannot_be_read_are_refused(tmp_path, capsys):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    good = tmp_path / "good.json"
    good.write_text(json.dumps(throughput(1.0)))
    for name, message in (("missing", "No such file"), ("bytes", "is not text"), (".", "directory")):
        assert main(["bench", "compare", str(good), str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        main(["bench", "compare", str(good)])
    assert refused.value.code == 2
    assert "at least two files" in capsys.readouterr().err


def test_the_kind_is_known_to_suggestions(capsys):
    assert main(["bench", "comapre"]) == 2
    assert "did you mean compare?" in capsys.readouterr().err
