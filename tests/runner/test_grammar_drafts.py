"""Drafts of requests with a grammar change none of their tokens: lying ones, and those that grammars force.

The demo model writes JSON and calls that are cut off or not; a random one gets grammars of letters on a device.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.kernels.gpu import DEVICE
from tests.runner.fake_platform import FakePlatform
from tests.runner.test_drafts import LyingDrafter, requests, told
from tests.runner.test_not_numbers import run, running
from tests.structured.test_masks import grammar_text
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.demo import demo_model_path
from tokenmill.engine.engine import Engine
from tokenmill.frontend.tokenizer import Tokenizer
from tokenmill.sampling import reference

SEED = random.SystemRandom().randrange(2**32)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}, "is_old": {"const": True}},
    "required": ["name", "age", "is_old"],
    "additionalProperties": False,
}
SIZES: dict[str, Any] = {"page_size": 16, "max_num_batched_tokens": 80}
DEMO: dict[str, Any] = {"dtype": "bfloat16", "kernels": "native", **SIZES}


def demo_kinds() -> list[dict[str, Any]]:
    """All that goes together with a grammar, for grammars of JSON, of calls and of letters."""
    tokenizer = Tokenizer.load(demo_model_path())

    def grammar(notation: str | None = None, **outputs: Any) -> Grammar:
        asked = StructuredOutputs(**outputs) if outputs else None
        return Grammar(grammar_text(tokenizer, asked, notation, False), "structured_outputs")

    person, words, call = grammar(json=PERSON), grammar(regex="[a-z ]{1,30}"), grammar("hermes")
    return [
        {"temperature": 0.0, "grammar": person},
        {"temperature": 1.0, "grammar": person, "logprobs": 1},
        {"temperature": 1.0, "top_k": 50, "grammar": person},
        {"temperature": 0.0, "grammar": call, "logprobs": 2},
        {"temperature": 1.0, "grammar": call},
        {"temperature": 0.8, "top_p": 0.9, "grammar": call},
        {"temperature": 1.0, "min_tokens": 6, "grammar": words, "stop_token_ids": tuple(range(60, 500, 5))},
        {"temperature": 1.0, "top_k": 300, "min_tokens": 4, "grammar": words, "presence_penalty": 0.9, "logprobs": 0},
        {"temperature": 0.0, "grammar": words, "bad_word_ids": ((66,), (70, 71)), "repetition_penalty": 1.2},
        {"temperature": 1.0, "grammar": grammar(choice=("the quick brown fox", "a lazy dog sleeps")), "logprobs": 1},
        {"temperature": 1.0, "logprobs": 1},
    ]


class HoldingDrafter(LyingDrafter):
    """Waits for launched steps, so that drafts come with overlap too."""

    def holds(self, request: Request, num_running: int) -> bool:
        return True


class ForcedDrafter(HoldingDrafter):
    """Drafts what grammars force, and otherwise nothing."""

    num_drafts = num_accepted = 0

    def draft(self, request: Request, limit: int) -> TokenArray:
        assert request.proposal is None or request.proposal.is_forced
        return np.empty(0, dtype=np.int32) if request.proposal is None else request.proposal.token_ids[:limit]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted


def check(engine: Engine, wanted: list[AddRequest], drafters: list[LyingDrafter], is_exact: bool) -> int:
    """Run without drafts and with those of each drafter; returns the longest that came at once."""
    print(f"seed {SEED}")
    plain, most = run(engine, wanted), 0
    for drafter in drafters:
        drafter.outputs = {name: told(own)[0][0] for name, own in plain.items()}
        engine.scheduler._drafter = drafter
        drafted = run(engine, wanted)
        for request in wanted:
            (want, logprobs), (got, drafted_logprobs) = told(plain[request.id]), told(drafted[request.id])
            assert got == want, request.params
            assert drafted_logprobs == (logprobs if is_exact else pytest.approx(logprobs, abs=1e-3)), request.params
        if not isinstance(drafter, ForcedDrafter):
            most = max(most, *(len(one.token_ids) for request in wanted for one in drafted[request.id]))
    engine.scheduler._drafter = None
    return most


def proposing(engine: Engine) -> None:
    """Let its grammars say what they force."""
    executor = engine.executor
    runner = getattr(executor, "runner", None) or executor._inline.runner
    runner._rows.grammars._proposes = True


@pytest.mark.parametrize(
    ("options", "slow_seconds"),
    [
        (DEMO, 1.0),
        ({**DEMO, "async_scheduling": True, "max_num_seqs": 5}, 1.0),
        ({**DEMO, "num_pages": 16}, 1.0),
        ({**DEMO, "async_scheduling": True}, 0.0),
        ({**SIZES, "dtype": "float32", "kernels": "torch", "attention_backend": "cpu"}, 1.0),
    ],
    ids=["native", "overlap", "preemption", "late", "torch"],
)
def test_no_bit_of_a_structured_output_changes(
    options: dict[str, Any], slow_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`slow_seconds` of 0 sends all masks to threads, which are not waited for."""
    for name in ("grammar_rows", "row_grammar"):
        monkeypatch.setattr(f"tokenmill.sampling.{name}.SLOW_SECONDS", slow_seconds)
    if not slow_seconds:
        monkeypatch.setattr("tokenmill.sampling.grammar_rows.PATIENCE", 0.0)
    rng = random.Random(SEED)
    with running(demo_model_path(), **{"async_scheduling": False, **options}) as engine:
        proposing(engine)
        wanted = requests(rng, demo_kinds(), 30)
        forced = ForcedDrafter({}, rng)
        most = check(engine, wanted, [HoldingDrafter({}, rng), forced], options.get("kernels") == "native")
        assert (engine.stats().num_preemptions > 0) == ("num_pages" in options)
        if slow_seconds:
            assert most >= 4
            assert 0 < forced.num_accepted <= forced.num_drafts


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.parametrize("patience", [30.0, 0.0], ids=["masks", "late"])
@pytest.mark.parametrize(
    "options",
    [{"kernels": "torch"}, {"kernels": "torch", "async_scheduling": True}, {"kernels": "torch", "num_pages": 12}],
    ids=["eager", "overlap", "preemption"],
)
def test_nor_on_a_device(
    tmp_path: Path, options: dict[str, Any], patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.sampling.grammar_rows.PATIENCE", patience)
    monkeypatch.setattr("tokenmill.sampling.triton_draw.draw", reference.draw)  # not interpreted, which takes minutes
    rule = '%llguidance {"no_forcing": true}\nstart: /[a-d]{1,5}/ "hello" /[a-p]{2,9}/'
    grammar = Grammar(json.dumps({"grammars": [{"lark_grammar": rule}]}), "structured_outputs")
    rng = random.Random(SEED)
    ways = [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 1}, {"temperature": 1.0, "top_k": 250}]
    kinds = [{**way, "grammar": grammar} for way in ways]
    kinds.append({"temperature": 1.0, "grammar": grammar, "min_tokens": 9, "presence_penalty": 0.5})
    kinds.append({"temperature": 1.0, "grammar": grammar, "stop_token_ids": tuple(range(97, 112, 5))})
    model = make_checkpoint(tmp_path, "qwen3", seed=SEED, num_attention_heads=4, num_key_value_heads=1)
    sizes = {"dtype": "float32", "enforce_eager": True, "num_pages": 60, "async_scheduling": False}
    with running(model, FakePlatform(), **{**sizes, **options}) as engine:
        proposing(engine)
        drafters = [HoldingDrafter({}, rng), ForcedDrafter({}, rng)]
        most = check(engine, requests(rng, kinds, 20), drafters, is_exact=False)
        assert (engine.stats().num_preemptions > 0) == ("num_pages" in options)
        assert most > 1
