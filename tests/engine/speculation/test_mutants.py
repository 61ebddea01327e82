"""Faults in speculation, put in on purpose: the tests that are to find them do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tests.engine.runner.test_drafts import LETTERS
from tests.engine.scheduler.harness import Harness
from tests.engine.scheduler.test_drafts import AlwaysRight
from tests.engine.speculation.exactness import check
from tests.seeding import seed_for
from tokenmill.core.request import Request
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.runner.samples import Samples
from tokenmill.model.sampling.grammar_rows import RowSamples
from tokenmill.model.sampling.row_grammar import RowGrammar

SEED = seed_for(__name__)


def traffic(**settings: object) -> None:
    """Requests whose text goes on from what others have said: what the cache took in is used."""
    rng = random.Random(SEED)
    harness = Harness(drafts=4, page_size=2, num_pages=24, max_model_len=24, **settings)  # type: ignore[arg-type]
    for _ in range(60):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        first = harness.add(prompt, rng.randint(1, 10))
        harness.drain()
        tokens = [*prompt, *harness.records[first].tokens]
        for end in (len(tokens), rng.randint(1, len(tokens))):
            harness.add([*tokens[:end], rng.randrange(3)], rng.randint(1, 6))
        harness.drain()


def test_without_a_fault_nothing_is_found() -> None:
    print(f"seed {SEED}")
    traffic()


def test_a_token_behind_the_first_wrong_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    are_due = Samples.are_due

    def one_too_many(samples: Samples, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        due = are_due(samples, token_ids)
        behind = np.concatenate([[False], due[:-1] & (samples.indices[1:] == samples.indices[:-1])])
        return np.asarray(due | behind)

    monkeypatch.setattr(Samples, "are_due", one_too_many)
    with pytest.raises(AssertionError):
        check(SEED, num_tokens=4000, num_requests=24)


def check_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that draw under a mask at once, and requests whose matcher is asked afterwards."""
    kinds = [{"temperature": 1.0, "grammar": LETTERS, "top_p": top_p} for top_p in (0.9, 1.0)]
    monkeypatch.setattr("tests.engine.speculation.exactness.KINDS", kinds)
    check(SEED, num_tokens=1500, num_requests=24)


def test_with_the_right_masks_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check_grammars(monkeypatch)


def test_the_mask_of_the_draft_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = RowGrammar.settle

    def one_late(row: RowGrammar, masks: npt.NDArray[np.int32]) -> None:
        settle(row, np.concatenate([masks[:1], masks[:-1]]))

    monkeypatch.setattr(RowGrammar, "settle", one_late)
    with pytest.raises(AssertionError):
        check_grammars(monkeypatch)


def test_a_matcher_that_is_told_what_was_drawn_behind_a_wrong_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = RowSamples.take_samples

    def one_more(samples: RowSamples, tokens: Sequence[int], take_one: Callable[[int], bool]) -> bool:
        is_taken = take(samples, tokens, take_one)
        if is_taken and 0 < samples.num_taken < samples.count and tokens[samples.index + samples.num_taken] >= 0:
            samples.row.taken.append(tokens[samples.index + samples.num_taken])
        return is_taken

    monkeypatch.setattr(RowSamples, "take_samples", one_more)
    with pytest.raises(AssertionError):
        check_grammars(monkeypatch)


def test_a_page_with_a_rejected_draft_in_the_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_full_pages = KVManager.cache_full_pages

    def too_many(kv: KVManager, request: Request, num_tokens: int, step: int) -> None:
        # The last known token has not been run: where it ends a page, a draft may stand in its slot.
        cache_full_pages(kv, request, max(num_tokens, request.num_tokens), step)

    monkeypatch.setattr(KVManager, "cache_full_pages", too_many)
    with pytest.raises(AssertionError):
        traffic()


def test_tokens_behind_a_stop_inside_drafts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    append_outputs = Request.append_outputs

    def all_of_them(request: Request, token_ids: list[int], num_rejected: int = 0) -> list[int]:
        append_outputs(request, token_ids, num_rejected)
        return token_ids

    monkeypatch.setattr(Request, "append_outputs", all_of_them)
    harness = Harness(eos=frozenset(range(0, 50, 5)))
    harness.scheduler.state.drafters = (AlwaysRight(4),)
    for start in range(12):
        harness.add([start, 1, 2], 24)
    with pytest.raises(AssertionError):
        harness.drain()
