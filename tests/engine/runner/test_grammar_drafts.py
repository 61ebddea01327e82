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
from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_drafts import HoldingDrafter, LyingDrafter, requests
from tests.engine.runner.test_not_numbers import run, running
from tests.engine.runner.told import assert_same, told
from tests.model.kernels.gpu import DEVICE
from tests.model.structured.test_masks import grammar_text
from tests.seeding import seed_for
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.demo import demo_model_path
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.sampling import reference
from tokenmill.model.sampling.grammar_rows import GrammarRows
from tokenmill.serving.frontend.tokenizer import Tokenizer

SEED = seed_for(__name__)
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
        engine.scheduler.state.drafters = (drafter,)
        drafted = run(engine, wanted)
        assert_same(*([told(ran[request.id]) for request in wanted] for ran in (plain, drafted)), is_exact)
        if not isinstance(drafter, ForcedDrafter):
            most = max(most, *(len(one.token_ids) for request in wanted for one in drafted[request.id]))
    engine.scheduler.state.drafters = ()
    return most


def counting_late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that went without a token in a step, once for each, since no mask was there in time."""
    late: list[str] = []
    resample = Request.resample
    monkeypatch.setattr(Request, "resample", lambda request: (late.append(request.id), resample(request)))
    return late


def proposing(engine: Engine) -> GrammarRows:
    """Its grammars, which say from now on what they force."""
    executor = engine.executor
    runner = getattr(executor, "runner", None) or executor._inline.runner
    grammars: GrammarRows = runner._rows.grammars
    grammars._proposes = True
    return grammars


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (DEMO, "host"),
        ({**DEMO, "async_scheduling": True, "max_num_seqs": 5}, "host"),
        ({**DEMO, "num_pages": 9}, "host"),
        ({**DEMO, "async_scheduling": True}, "late"),
        ({**DEMO, "async_scheduling": True}, "beside"),
        ({**DEMO, "num_pages": 9}, "late beside"),
        ({**SIZES, "dtype": "float32", "kernels": "torch", "attention_backend": "cpu"}, "host"),
    ],
    ids=["native", "overlap", "preemption", "late", "beside", "late beside", "torch"],
)
def test_no_bit_of_a_structured_output_changes(
    options: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`where`: "beside", as on a device; "late", in threads that are not waited for."""
    is_late = where.startswith("late")
    for name in ("grammar_rows", "row_grammar"):
        monkeypatch.setattr(f"tokenmill.model.sampling.{name}.SLOW_SECONDS", 0.0 if is_late else 1.0)
    monkeypatch.setattr("tokenmill.model.sampling.grammar_rows.PATIENCE", 0.0 if is_late else 30.0)
    rng, late = random.Random(SEED), counting_late(monkeypatch)
    with running(demo_model_path(), **{"async_scheduling": False, **options}) as engine:
        proposing(engine)._on_host &= not where.endswith("beside")
        wanted = requests(rng, demo_kinds(), 30)
        forced = ForcedDrafter({}, rng)
        most = check(engine, wanted, [HoldingDrafter({}, rng), forced], options.get("kernels") == "native")
        assert (engine.stats().num_preemptions > 0) == ("num_pages" in options)
        assert bool(late) == is_late
        if not is_late:
            assert most >= 4
            assert 0 < forced.num_accepted <= forced.num_drafts


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.parametrize("options", [{"async_scheduling": True}, {"num_pages": 4}], ids=["overlap", "preemption"])
def test_nor_on_a_device(tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.model.sampling.grammar_rows.PATIENCE", 30.0)
    monkeypatch.setattr(
        "tokenmill.model.sampling.triton_draw.draw", reference.draw
    )  # not interpreted, which takes minutes
    rule = '%llguidance {"no_forcing": true}\nstart: /[a-d]{1,2}/ "hel" /[a-p]{6}/'
    grammar = Grammar(json.dumps({"grammars": [{"lark_grammar": rule}]}), "structured_outputs")
    rng = random.Random(SEED)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 1.0, "min_tokens": 6},
        {"temperature": 1.0, "top_k": 250, "stop_token_ids": tuple(range(97, 112, 5)), "min_tokens": 5},
    ]
    shape = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model = make_checkpoint(tmp_path, "qwen3", seed=SEED, **shape)
    sizes = {
        "dtype": "float32",
        "enforce_eager": True,
        "num_pages": 60,
        "async_scheduling": False,
        "max_num_seqs": 3,
        "page_size": 16,
    }
    with running(model, FakePlatform(), **{**sizes, "kernels": "torch", **options}) as engine:
        proposing(engine)
        wanted = [
            AddRequest(
                id=str(i),
                prompt_token_ids=[i, *range(13)],  # each needs another page soon, before any can have ended
                params=SamplingParams(seed=i, grammar=grammar, max_tokens=12, **way),
            )
            for i, way in enumerate(ways)
        ]
        most = check(engine, wanted, [HoldingDrafter({}, rng), ForcedDrafter({}, rng)], is_exact=False)
        assert (engine.stats().num_preemptions > 0) == ("num_pages" in options)
        assert most > 1
