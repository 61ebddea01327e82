"""Engines of many families and features on the fake GPU.

    python -m tests.engine.runner.fake_gpu_cases FOLDER [CASE ...]

A line of JSON with the names of all cases, and one for each that runs: `test_fake_gpu.py` says what may be in it.
Without names some are drawn, all at night.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.encoder_checkpoints import ENCODERS, make_encoder
from tests.engine.runner.fake_gpu_engines import requests, run, texts
from tests.engine.runner.fake_gpu_features import features
from tests.engine.runner.fake_gpu_ranks import ranks
from tests.tiers import some
from tokenmill.startup.assembly import device_runners

NUM_DRAWN = 2


def cases(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every case, by name."""

    def plain(family: str = "qwen3", **options: Any) -> Callable[[], dict[str, Any]]:
        count = 2 + options.get("max_num_seqs", 5)
        return lambda: run(make_checkpoint(folder / family, family, seed=0), requests(count), **options)

    def pooled(model: Path) -> dict[str, Any]:
        return run(model, texts(), max_model_len=62)

    made = {family: plain(family) for family in FAMILIES}
    made |= {family: partial(lambda name: pooled(make_encoder(folder / name, name)), family) for family in ENCODERS}
    drafts = {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4})}

    def drafted(draft: str = "qwen3", **options: Any) -> dict[str, Any]:
        model = make_checkpoint(folder / "qwen3", "qwen3", seed=0)
        chosen = {"method": "draft_model", "model": str(make_checkpoint(folder / draft, draft, seed=0))}
        speculation = json.dumps({**chosen, "num_speculative_tokens": 3})
        return run(model, requests(2 + options.get("max_num_seqs", 5)), speculative_config=speculation, **options)

    made |= {
        "draft model": drafted,
        "draft model with windows": partial(drafted, "mistral"),
        "draft model of experts, many rows": partial(drafted, "qwen3_moe", max_num_seqs=17),
        "draft model, eager": partial(drafted, enforce_eager=True),
        "embeddings of a decoder": lambda: pooled(make_checkpoint(folder / "qwen3", "qwen3", seed=0)),
        "drafts": plain(**drafts),
        "drafts and windows": plain("gemma3", **drafts),
        "windows keep their pages": plain("gemma3", disable_hybrid_kv_cache_manager=True),
        # Sixteen rows and one row are compiled for, where a number is an argument.
        "many rows": plain(max_num_seqs=17),
        "many recurrent rows": plain("qwen3_next", max_num_seqs=17),
        "eager": plain(enforce_eager=True),
        "fp8": plain(quantization="fp8"),
        # A step of the whole budget rounds its rows, others widen the weights.
        "fp8 experts": plain("qwen3_moe", quantization="fp8", max_num_seqs=17, max_num_batched_tokens=256),
        "invariant": plain(batch_invariant=True),
        "without overlap": plain(async_scheduling=False),
        "tiny pool": plain(num_pages=90, max_model_len=320),
        "no shared splits": plain(shared_splits=False),
        "float32": plain(dtype="float32"),
    }
    large = made["many rows"]

    def without_parts() -> dict[str, Any]:
        with patch.object(device_runners, "TWICE_READ_BYTES", 0):
            return large()

    return {**made, "large weights": without_parts, **features(folder), **ranks(folder)}


def main() -> None:
    """Print the names, and a line for each case that is named, or else drawn."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    made = cases(folder)
    print(json.dumps({"names": list(made)}), flush=True)
    for name in names or some(list(made), NUM_DRAWN):
        try:
            found = made[name]()
        except Exception:
            found = {"failure": traceback.format_exc()[-3000:]}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
