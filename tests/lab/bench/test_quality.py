"""`bench quality`: figures against plain sums over whole distributions, and a run of the demo model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tokenmill.core.errors import InvalidConfig
from tokenmill.lab.bench.divergence import Scorer, scored_positions
from tokenmill.lab.bench.quality import BUNDLED, run, table

CONTEXT, VOCABULARY = 16, 50


def softmax(logits: np.ndarray) -> np.ndarray:
    values = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return values / values.sum(-1, keepdims=True)


def feed(scorer: Scorer, logits: np.ndarray, rng: np.random.Generator) -> None:
    """Chunks in pieces of any size, as steps bring them."""
    for number, chunk in enumerate(logits):
        scorer.begin_chunk(number)
        cuts = sorted(rng.choice(np.arange(1, CONTEXT - 1), 3, replace=False).tolist())
        for piece in np.split(chunk, cuts):
            scorer.add_logits(piece)


def test_figures_are_those_of_the_whole_distributions(tmp_path: Path, rng: np.random.Generator) -> None:
    chunks = rng.integers(0, VOCABULARY, (3, CONTEXT))
    wanted = rng.normal(size=(3, CONTEXT - 1, VOCABULARY)).astype(np.float32)
    other = wanted + rng.normal(scale=0.3, size=wanted.shape).astype(np.float32)
    scores = []
    for is_reference, logits in ((True, wanted), (False, other)):
        scorer = Scorer(chunks.tolist(), VOCABULARY, tmp_path / "store", is_reference)
        feed(scorer, logits, rng)
        scores.append(scorer.score())
    places = np.array(scored_positions(CONTEXT))
    assert places.tolist() == list(range(8, 15))
    p, q = softmax(wanted[:, places]), softmax(other[:, places])
    coming = chunks[:, places + 1]
    chosen = np.take_along_axis(q, coming[..., None], 2)[..., 0]
    divergences = (p * np.log(p / q)).sum(-1).ravel()
    row = scores[1].row(scores[0])
    assert row["ppl"] == pytest.approx(math.exp(-np.log(chosen).mean()), rel=1e-5)
    assert row["ppl_ratio"] == pytest.approx(row["ppl"] / scores[0].perplexity)
    assert row["kl_mean"] == pytest.approx(divergences.mean(), rel=1e-4)
    assert row["kl_p99"] == pytest.approx(np.percentile(divergences, 99), rel=1e-4)
    assert row["same_top"] == (p.argmax(-1) == q.argmax(-1)).mean()
    assert scores[0].row(scores[0]) == {
        "ppl": scores[0].perplexity,
        "ppl_ratio": 1.0,
        "kl_mean": 0.0,
        "kl_p99": 0.0,
        "same_top": 1.0,
    }


def test_the_demo_model_has_a_row_for_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(BUNDLED.read_text()[:2000])
    flags = ["--chunks", "2", "--context", "64", "--kv", "auto,int8", "--plot", str(tmp_path / "out.png")]
    assert run([*flags, "--text", str(tmp_path / "text"), "--formats", "bf16,int4", "--kernels", "native"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert [(row["format"], row["kv"]) for row in document["rows"]] == [
        ("float32", "float32"),
        ("bf16", "bf16"),
        ("bf16", "int8"),
        ("int4", "bf16"),
        ("int4", "int8"),
    ]
    assert lines == table(document["rows"]).splitlines()
    assert document["num_scored"] == 2 * 31
    by_format = {(row["format"], row["kv"]): row for row in document["rows"]}
    assert 0 < by_format["bf16", "bf16"]["kl_mean"] < by_format["int4", "bf16"]["kl_mean"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--formats", "int3"], "--formats: choose of float32, bf16, stored, int8, int4, fp8, got 'int3'"),
        (["--kv", "fp8"], "--kv: choose of auto, int8, int8-int4, int4, got 'fp8'"),
        (["--text", "/nowhere"], "--text: cannot read /nowhere: No such file or directory"),
        (["--context", "4"], "--context"),
    ],
)
def test_flags_are_checked_before_a_model_is_loaded(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        run(flags)
