"""Speculation changes no token: random requests on random engines, each without drafts and with them.

    python -m tests.engine.speculation.exactness [--tokens 1000000] [--seed 0]

Models of nine families, four with recurrent states, in four formats, parameters of every kind, few pages (preemptions),
policies, depths, sessions; drafters: the real ones, random EAGLE-3 heads and MTP layers among them, one that knows the
outputs and lies, one that says anything. What a head drafts for is also run where there is none. Native kernels must
bring the same bits: tokens, ends and log probabilities. In float32 torch computes, whose sums depend on the shape of a
step: what rounding may change is counted (`assert_same`). One line of JSON last; an error where something differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tqdm import tqdm

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.draft_heads import FORMS, HeadShape, make_head
from tests.engine.runner.test_drafts import KINDS, LyingDrafter
from tests.engine.runner.test_not_numbers import run, running
from tests.engine.runner.told import assert_same, told
from tests.mtp_layers import add_mtp
from tests.seeding import root_seed
from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.speculation.speculation import text_drafter

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "llama": {"hidden_size": 64},
    "mistral": {"hidden_size": 64, "sliding_window": 20},
    "qwen3_moe": {},
    "granite": {"hidden_size": 64},
    "lfm2": {"hidden_size": 64, "head_dim": 32},
    "qwen3_5": {"hidden_size": 64, "head_dim": 32},
    "qwen3_next": {"hidden_size": 64, "head_dim": 32},
    "granite_hybrid": {"hidden_size": 64, "head_dim": 32},
}
WITH_MTP = ("qwen3_5", "qwen3_next")
NATIVE = {"dtype": "bfloat16", "kernels": "native", "page_size": 16}
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": NATIVE,
    "int8": {**NATIVE, "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {**NATIVE, "quantization": "int4", "kv_cache_dtype": "int4"},
    "float32": {"dtype": "float32", "kernels": "torch", "attention_backend": "cpu"},
}
MOST_DRAFTED = 9


class MixedDrafter(LyingDrafter):
    """Asks another source each time: what will come with lies in it, either drafter of text, or chance."""

    def __init__(self, outputs: dict[str, list[int]], rng: random.Random) -> None:
        super().__init__(outputs, rng)
        self._texts = [text_drafter(SpeculativeConfig(method, prompt_lookup_min=1)) for method in ("ngram", "suffix")]

    def draft(self, request: Request, limit: int) -> TokenArray:
        source, limit = self.rng.randrange(8), min(limit, MOST_DRAFTED)
        if source > 5 and request.proposal is not None:
            return request.proposal.token_ids[:limit]
        if source == 0:
            return np.array([self.rng.randrange(VOCAB_SIZE) for _ in range(limit)], dtype=np.int32)
        if source < 3:
            drafter = self._texts[source - 1]
            assert drafter is not None, "both draft from text"
            return drafter.propose(request, limit).token_ids
        return super().draft(request, limit)

    def holds(self, request: Request, num_running: int) -> bool:
        return self.rng.random() < 0.3

    def forget_request(self, request: Request) -> None:
        for drafter in self._texts:
            assert drafter is not None, "both draft from text"
            drafter.forget_request(request)


def wishes(rng: random.Random, number: int) -> list[AddRequest]:
    """Requests of any kind, some of them in groups with one prompt."""
    made: list[AddRequest] = []
    while len(made) < number:
        prompt = [rng.randrange(250) for _ in range(rng.choice([1, 5, 16, 40]))] * rng.choice([1, 1, 2])
        fields = {"seed": rng.randrange(2**31), "max_tokens": rng.randint(8, 60), **rng.choice(KINDS)}
        for _ in range(rng.choice([1, 1, 1, 3])):
            params = SamplingParams(**{**fields, "seed": fields["seed"] + len(made)})
            made.append(
                AddRequest(
                    id=str(len(made)),
                    prompt_token_ids=prompt,
                    params=params,
                    priority=rng.randrange(2),
                    tenant=rng.choice("ab"),
                )
            )
    return made


def engine_options(rng: random.Random, form: str) -> dict[str, Any]:
    """An engine with little of everything."""
    return {
        **FORMATS[form],
        "max_model_len": 160,
        "max_num_seqs": rng.choice([3, 8, 16]),
        "max_num_batched_tokens": rng.choice([24, 60, 200]),
        "num_pages": rng.choice([40, 70, 150]) * 16 // int(FORMATS[form].get("page_size", 4)),
        "async_scheduling": rng.random() < 0.4,
        "scheduling_policy": rng.choice(["fair", "fcfs", "priority"]),
        "batch_policy": rng.choice(["mixed", "decode-first", "prefill-first"]),
        "admission": rng.choice(["whole-prompt", "optimistic", "reserve"]),
    }


def compare(
    engine: Engine, drafting: Engine, wanted: list[AddRequest], rng: random.Random, is_exact: bool
) -> Counter[str]:
    """Run requests without drafts and with them, perhaps on another engine; counts of what was seen.

    Raises:
        AssertionError: something differs.
    """
    plain = run(engine, wanted)
    answers = {name: told(outputs) for name, outputs in plain.items()}
    drafter = MixedDrafter({name: one[0][0] for name, one in answers.items()}, rng)
    drafting.scheduler.state.drafters = (drafter,)
    before = drafting.stats()
    drafted = run(drafting, wanted)
    drafting.scheduler.state.drafters = ()
    drafted_answers = [told(drafted[request.id]) for request in wanted]
    num_close = assert_same([answers[request.id] for request in wanted], drafted_answers, is_exact)
    after = drafting.stats()
    return Counter(
        tokens=sum(len(one[0][0]) for one in answers.values()),
        drafts=after.num_draft_tokens - before.num_draft_tokens,
        accepted=after.num_accepted_tokens - before.num_accepted_tokens,
        preemptions=after.num_preemptions - before.num_preemptions,
        requests=len(wanted),
        close_draws_in_float32=num_close,
    )


def scenarios(seed: int, folder: Path) -> Iterator[tuple[str, Path, dict[str, Any], random.Random]]:
    """Name, model, options of the engine, and what is random in it: endless, each family in each format in turn."""
    for number in count():
        family, form = list(FAMILIES)[number % len(FAMILIES)], list(FORMATS)[number % len(FORMATS)]
        rng = random.Random(f"{seed}/{number}")
        path = folder / f"{family}-{number % 40}"
        if not path.exists():
            path.mkdir()
            make_checkpoint(path, family, seed=rng.randrange(2**31), **FAMILIES[family])
            if family in WITH_MTP:
                add_mtp(path, rng.randrange(2**31))
        yield f"{number} {family} {form}", path, engine_options(rng, form), rng


@contextmanager
def drafting_engine(engine: Engine, model: Path, options: dict[str, Any], rng: random.Random) -> Iterator[Engine]:
    """Another engine with a random head, of the model's own where it has one, or every other time the same."""
    if rng.random() < 0.5:
        yield engine
        return
    chosen: dict[str, Any] = {"num_speculative_tokens": rng.choice([1, 4, 9])}
    has_mtp = model.name.partition("-")[0] in WITH_MTP and rng.random() < 0.7
    chosen |= {"method": "mtp"} if has_mtp else {"method": "eagle3", "model": str(random_head(model, rng))}
    # Random heads are unsure of all that they draft, and would draft little.
    with (
        patch("tokenmill.engine.speculation.eagle_head.LEAST_CHANCE", 0.0),
        running(model, **options, speculative_config=json.dumps(chosen)) as other,
    ):
        yield other


def random_head(model: Path, rng: random.Random) -> Path:
    """Write an EAGLE-3 head for a model; return its folder."""
    flags = {flag: True for flag in ("norm_before_residual", "norm_before_fc", "norm_output") if rng.random() < 0.3}
    shape = HeadShape(
        rng.choice(FORMS),
        num_draft_tokens=rng.choice([None, 90, 200]),
        boundaries=tuple(rng.randrange(2) for _ in range(3)),
        has_embedding=rng.random() < 0.3,
        flags=flags,
    )
    return make_head(model / "head", model, shape, rng.randrange(2**31))


def check(seed: int, num_tokens: int, num_requests: int = 40) -> Counter[str]:
    """Compare until so many tokens have been.

    Raises:
        AssertionError: something differs; its scenario is in a note.
    """
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, tqdm(total=num_tokens, unit="tok", disable=None) as bar:
        for name, model, options, rng in scenarios(seed, Path(folder)):
            with running(model, **options) as engine, drafting_engine(engine, model, options, rng) as drafting:
                try:
                    is_exact = options["dtype"] != "float32"
                    found = compare(engine, drafting, wishes(rng, num_requests), rng, is_exact)
                except AssertionError as error:
                    error.add_note(f"seed {seed}, scenario {name}: {options}")
                    raise
            seen += found
            seen["scenarios"] += 1
            seen["heads"] += drafting is not engine
            bar.update(found["tokens"])
            if seen["tokens"] >= num_tokens:
                return seen
    raise AssertionError("scenarios do not end")


def main() -> None:
    """Compare and print.

    Raises:
        AssertionError: something differs.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=root_seed())
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    started = time.monotonic()
    seen = check(options.seed, options.tokens)
    print(json.dumps({"seed": options.seed, "seconds": round(time.monotonic() - started), **seen, "differ": 0}))


if __name__ == "__main__":
    main()
