"""The loss of each engine's formats: logits on a text against those of float32, from the same weights.

The models are published ones with their channels in another order (real_model.py), and the demo model. What they are
judged against are TokenMill's logits in float32, which transformers' agree with; the text is that of `tokenmill bench
quality`, the demo model's conversations that it has not seen.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers import models
from benchmarks.peers.adapter_run import run_adapter
from benchmarks.peers.adapters.adapter import Setup, Texts
from benchmarks.peers.peers import PEERS, TOKENMILL, Peer

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.lab.bench.divergence import Score, Scorer, scored_positions
from tokenmill.lab.bench.quality import BUNDLED, REFERENCE, cut
from tokenmill.llm.local import load_llm
from tokenmill.model.weights.catalogue import CATALOGUE, locate

CONTEXT = 512
# Few conversations of the demo model are longer.
DEMO_CONTEXT, DEMO_SAMPLES, DEMO_SEED = 128, 2000, 0
JUDGE_SECONDS = 1800.0
KV_BYTES = 1 << 30


def judge_all(
    published: Sequence[str], chosen: Sequence[tuple[Peer, str]], threads: int, num_chunks: int
) -> list[dict[str, Any]]:
    """Return an entry for each published model, engine and format: its figures against float32, or its error."""
    own = next(peer for peer in PEERS if peer.name == TOKENMILL)
    entries = []
    for model in published:
        with tempfile.TemporaryDirectory(prefix="tokenmill-peers-") as folder:
            try:
                if model != models.DEMO:
                    locate(CATALOGUE[models.package_name(model)], Path(folder))
            except InvalidCheckpoint:
                print(f"{model} is not installed (make real): formats are not judged on it", file=sys.stderr)
                continue
            cut_model = conversations if model == models.DEMO else cut_text
            texts = cut_model(models.real(model), num_chunks, Path(folder))
            reference = judge_format(own, model, REFERENCE, texts, threads)
            for peer, weights in chosen:
                if peer.real is not None:
                    entry = judge_format(peer, model, weights, texts, threads, reference)
                    entries.append({"model": model, "peer": peer.name, "weights": weights, **entry})
                    print(_line(entries[-1]), file=sys.stderr)
    return entries


def cut_text(model: Path, num_chunks: int, folder: Path) -> Texts:
    """Return chunks of the text in a model's tokens; logits go into `folder`."""
    config = EngineConfig(model=str(model), max_model_len=CONTEXT + 16, max_num_seqs=1)
    with load_llm(config) as llm:
        chunks = cut(llm, BUNDLED.read_text(encoding="utf-8"), CONTEXT, num_chunks)
    scored = scored_positions(CONTEXT)
    return Texts(chunks, scored.start, scored.stop, str(folder / "logits"))


def conversations(model: Path, num_chunks: int, folder: Path) -> Texts:
    """Return beginnings of conversations that the demo model has not seen: eight for each chunk of other models."""
    sys.path.insert(0, str(models.ROOT / "examples" / "train_demo"))
    from data import Encoder
    from skills import SKILLS

    rng = random.Random(DEMO_SEED)
    drawn = [SKILLS[name](rng, "heldout") for _ in range(DEMO_SAMPLES // len(SKILLS)) for name in SKILLS]
    whole = (row.ids.tolist() for row in Encoder(model).rows(drawn))
    chunks = [ids[:DEMO_CONTEXT] for ids in whole if len(ids) >= DEMO_CONTEXT][: num_chunks * 8]
    scored = scored_positions(DEMO_CONTEXT)
    return Texts(chunks, scored.start, scored.stop, str(folder / "logits"))


def judge_format(
    peer: Peer, model: str, weights: str, texts: Texts, threads: int, reference: Score | None = None
) -> Any:
    """Return the entry of a format; of the reference, its score."""
    assert peer.real is not None
    folder = Path(texts.logits).parent
    path = str(peer.real(model, weights))
    setup = Setup(path, weights, threads, KV_BYTES, 0, time.monotonic(), (), str(folder / "outcome.json"), texts)
    outcome = run_adapter(peer, setup, JUDGE_SECONDS)
    if "error" in outcome:
        if reference is None:
            raise SystemExit(f"{model} in {weights}: {outcome['error']}")
        return outcome
    count = len(texts.chunks) * (texts.last - texts.first)
    vocab_size = Path(texts.logits).stat().st_size // (4 * count)
    scorer = Scorer(texts.chunks, vocab_size, folder / "reference", is_reference=reference is None)
    logits = np.memmap(texts.logits, np.float32, "r").reshape(-1, texts.last - texts.first, vocab_size)
    for number, chunk in enumerate(logits):
        scorer.begin_chunk(number, texts.first)
        scorer.add_logits(chunk)
    score = scorer.score()
    return score if reference is None else {**score.row(reference), "bytes": outcome["bytes"]}


def _line(entry: dict[str, Any]) -> str:
    head = f"{entry['model']}, {entry['peer']} {entry['weights']}: "
    if "error" in entry:
        return f"{head}FAILED: {entry['error']}"
    return (
        f"{head}perplexity {entry['ppl_ratio']:.4f} of float32's, KL {entry['kl_mean']:.5f}, p99 {entry['kl_p99']:.4f},"
        f" same top {entry['same_top']:.1%}, {entry['bytes'] / 2**20:.0f} MiB"
    )
