"""The results as docs/performance.md and a picture: medians of the rounds, TokenMill against the best other engine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.peers.peers import FORMATS, PEERS, TOKENMILL

from tokenmill.lab.bench.plot import Line, Panel, draw

HERE = Path(__file__).parent
# Results that the page is made of: of a shape with random weights, and of a published model.
RESULTS, PUBLISHED = HERE / "results.json", HERE / "results_published.json"
DOCS = HERE.parents[1] / "docs"
BATCH_SIZES = (1, 8, 32)
ROWS = ("prefill 512", *(f"decode {size}" for size in BATCH_SIZES))
GIB = 1 << 30
# How many times the best other engine TokenMill aims to reach.
TARGETS = {
    "bf16": dict(zip(ROWS, (1.0, 1.25, 1.4, 1.35), strict=True)),
    "int8": dict(zip(ROWS, (1.5, 1.4, 1.5, 2.0), strict=True)),
    "int4": dict(zip(ROWS, (2.0, 1.2, 1.6, 2.0), strict=True)),
}
SERVING_TARGET = 1.5

Entry = dict[str, Any]


def write_report() -> None:
    """Write docs/performance.md and docs/performance.svg of the results that are kept."""
    results = json.loads(RESULTS.read_text())
    published = json.loads(PUBLISHED.read_text()) if PUBLISHED.exists() else None
    draw(str(DOCS / "performance.svg"), panels(results["runs"]))
    (DOCS / "performance.md").write_text(document(results, published), encoding="utf-8")


def document(results: dict[str, Any], published: dict[str, Any] | None = None) -> str:
    """The page, from its template. `published`: results of a published model, or none yet."""
    runs = results["runs"]
    machine = results["machine"]
    return Template((HERE / "performance_template.md").read_text(encoding="utf-8")).substitute(
        date=results["date"],
        machine=f"{machine['processor']}, {machine['cpus']} cores, Linux {machine['kernel']}",
        threads=results["threads"],
        rounds=f"{1 + max(run['round'] for run in runs)} of {results['rounds']} planned",
        probes=probes(runs),
        load=f"{machine['load_average']:.1f}",
        versions=", ".join(f"{name} {version}" for name, version in sorted(versions(runs).items())),
        offline=offline_table(runs, results.get("quality", ())),
        ratios=ratio_table(runs, results.get("quality", ())),
        context=context_table(runs),
        serving=serving_table(results["serving"]),
        published="" if published is None else published_part(published),
    )


def published_part(results: dict[str, Any]) -> str:
    """The part of one run of all engines on a published model; speeds by processor time."""
    machine, runs = results["machine"], results["runs"]
    known = ", ".join(f"{name} {version}" for name, version in sorted(versions(runs).items()))
    words = (
        f"### All engines in one run\n\n{results['shape']}, the same weights, {results['date']}, "
        f"{machine['processor']}, load average {machine['load_average']:.1f}; {results['threads']} threads, "
        f"medians of {results['rounds']} rounds, tokens by the second of processor time. {known}."
    )
    return f"\n{words}\n\n{offline_table(runs, results['quality'], 'cpu_second')}\n"


def figure(runs: Iterable[Entry], peer: str, weights: str, take: Callable[[Entry], float | None]) -> float | None:
    """Median over the rounds; None: it was not measured."""
    entries = [run for run in runs if (run["peer"], run["weights"]) == (peer, weights) and "error" not in run]
    values = [value for value in map(take, entries) if value is not None]
    return statistics.median(values) if values else None


def rate(name: str, unit: str = "second") -> Callable[[Entry], float | None]:
    """Takes a point's tokens per second, or per `cpu_second`: of prefill for a prefill point, else of decode."""
    kind = f"{'prefill' if name.startswith('prefill') else 'decode'}_tokens_per_{unit}"

    def take(run: Entry) -> float | None:
        value: float | None = run["points"].get(name, {}).get(kind)
        return value

    return take


def measured(runs: Iterable[Entry]) -> list[tuple[str, str]]:
    """Engine and format of every row, by format."""
    seen = {(run["peer"], run["weights"]) for run in runs}
    return [(peer.name, weights) for weights in FORMATS for peer in PEERS if (peer.name, weights) in seen]


def offline_table(runs: Sequence[Entry], quality: Sequence[Entry], unit: str = "second") -> str:
    """One row for each engine and format: its loss on published models, and its speed."""
    models = list(dict.fromkeys(entry["model"] for entry in quality))
    native = {(peer.name, weights): name for peer in PEERS for weights, name in peer.formats.items()}
    head = [
        "engine",
        "format",
        *(f"loss, {model}" for model in models),
        "prefill, 512 tokens",
        *(f"decode, {size}" for size in BATCH_SIZES),
    ]
    head += ["first token", "own memory", "with mapped files"]
    rows = []
    for peer, weights in measured(runs):
        row = [peer, native[peer, weights], *(_loss(quality, model, peer, weights) for model in models)]
        row += [*(_number(figure(runs, peer, weights, rate(name, unit))) for name in ROWS)]
        row.append(_number(figure(runs, peer, weights, lambda run: run["first_token_seconds"]), "s", digits=1))
        for kind in ("anonymous", "resident"):
            row.append(_number(figure(runs, peer, weights, lambda run, k=kind: run["peak"][k] / GIB), "GiB", digits=2))
        rows.append(row)
    return _table(head, rows)


def _loss(quality: Sequence[Entry], model: str, peer: str, weights: str) -> str:
    """Perplexity over float32's, and KL divergence from it."""
    wanted = model, peer, weights
    for entry in quality:
        if (entry["model"], entry["peer"], entry["weights"]) == wanted and "error" not in entry:
            return f"{100 * (entry['ppl_ratio'] - 1):+.1f} %, KL {entry['kl_mean']:.4f}"
    return "-"


def ratio_table(runs: Sequence[Entry], quality: Sequence[Entry]) -> str:
    """TokenMill against the best other engine in the same format, beside the target and what both lose."""
    rows = []
    models = [quality[0]["model"]] if quality else []
    for weights in FORMATS:
        for name in ROWS:
            own = figure(runs, TOKENMILL, weights, rate(name))
            others = {
                peer.name: figure(runs, peer.name, weights, rate(name)) for peer in PEERS if peer.name != TOKENMILL
            }
            known = {peer: value for peer, value in others.items() if value is not None}
            if own is None or not known:
                continue
            best = max(known, key=lambda peer: known[peer])
            ratio, target = own / known[best], TARGETS[weights][name]
            verdict = "reached" if ratio >= target else "missed"
            row = [
                weights,
                name,
                _number(own),
                f"{best} {_number(known[best])}",
                f"{ratio:.2f}x",
                f"{target}x",
                verdict,
            ]
            rows.append(
                [*row, *(_loss(quality, model, peer, weights) for model in models for peer in (TOKENMILL, best))]
            )
    head = ["format", "tokens/s", TOKENMILL, "best other", "ratio", "target", ""]
    return _table([*head, *(["our loss", "its loss"] if models else [])], rows)


def context_table(runs: Sequence[Entry]) -> str:
    """TokenMill's decode of 8 requests at two contexts."""
    rows = []
    for weights in FORMATS:
        short, long = (figure(runs, TOKENMILL, weights, rate(name)) for name in ("decode 8", "decode 8 at 2048"))
        if short is not None and long is not None:
            rows.append([weights, _number(short), _number(long), f"{(1 - long / short) * 100:.0f} %"])
    return _table(["format", "context 128", "context 2,048", "loss"], rows)


def serving_table(entries: Sequence[Entry]) -> str:
    """Medians over the rounds of what clients saw."""
    head = [
        "server",
        "output tokens/s",
        "TTFT p50",
        "TTFT p90",
        "TTFT p99",
        "between tokens p50",
        "p90",
        "p99",
        "errors",
    ]
    rows, rates = [], {}
    for name in dict.fromkeys(entry["peer"] for entry in entries):
        figures = [entry["figures"] for entry in entries if entry["peer"] == name]
        rates[name] = statistics.median(one["output_tokens_per_second"] for one in figures)
        row = [name, _number(rates[name])]
        for kind in ("ttft_seconds", "inter_token_seconds"):
            row += [
                _number(statistics.median(one[kind][p] for one in figures) * 1e3, "ms") for p in ("p50", "p90", "p99")
            ]
        rows.append([*row, str(sum(sum(one["errors"].values()) for one in figures))])
    if not rows:
        return "Not measured in this run."
    others = [value for name, value in rates.items() if name != TOKENMILL]
    if TOKENMILL not in rates or not others:
        return _table(head, rows)
    ratio = rates[TOKENMILL] / max(others)
    verdict = "reached" if ratio >= SERVING_TARGET else "missed"
    return f"{_table(head, rows)}\n\nOutput tokens: {ratio:.2f}x, target {SERVING_TARGET}x: {verdict}."


def probes(runs: Iterable[Entry]) -> str:
    """Range of what the machine gave before the runs."""
    found = [run["probe"] for run in runs]
    reads = [one["read_gb_per_second"] for one in found]
    products = [one["bf16_tflops"] for one in found]
    return (
        f"memory read at {min(reads):.0f} to {max(reads):.0f} GB/s (median {statistics.median(reads):.0f}), bfloat16 "
        f"products at {min(products):.2f} to {max(products):.2f} Tflop/s (median {statistics.median(products):.2f})"
    )


def versions(runs: Iterable[Entry]) -> dict[str, str]:
    """Package -> version; the engines that share torch have it in the same version or are listed apart."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.get("versions", {}).items():
            found.setdefault(name, set()).add(version)
    return {name: " and ".join(sorted(all_)) for name, all_ in found.items()}


def panels(runs: Sequence[Entry]) -> list[Panel]:
    """Decode tokens per second over the number of requests, a panel for each format."""
    drawn = []
    for weights in FORMATS:
        lines = []
        for peer in PEERS:
            points = [(size, figure(runs, peer.name, weights, rate(f"decode {size}"))) for size in BATCH_SIZES]
            known = [(size, value) for size, value in points if value is not None]
            if known:
                lines.append(Line(peer.name, [size for size, _ in known], [value for _, value in known]))
        if lines:
            drawn.append(Panel(f"decode, {weights}", "requests at once", "tokens per second", lines))
    return drawn


def _number(value: float | None, unit: str = "", digits: int | None = None) -> str:
    if value is None:
        return "-"
    places = digits if digits is not None else (1 if value < 100 else 0)
    return f"{value:,.{places}f}{' ' + unit if unit else ''}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
