"""Masks beside the steps: late ones, failing ones, rows that change hands; and masks applied to logits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.kernels.native import every_isa, kernels
from tokenmill.core.plan import AdmittedRequest
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.model.sampling.bitmask import TokenBitmask, apply_bitmask, clear_bits_by_bytes, clear_bits_by_words
from tokenmill.model.sampling.grammar_rows import GrammarRows, GrammarStep
from tokenmill.platform.host_arrays import HostArrays

VOCAB_SIZE = 40
HOST = HostArrays()


class Counting:
    """A matcher that allows the token that is the number of tokens it has seen, up to `limit`; it waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[int] = []
        self.error = ""
        self.limit = 1000
        self.end: int | None = None  # all that a mask has once the limit is reached
        self.num_masks = 0
        self.copies: list[Counting] = []

    def deep_copy(self) -> Counting:
        copy = Counting()
        copy.gate, copy.limit, copy.end = self.gate, self.limit, self.end
        self.copies.append(copy)
        return copy

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.gate.wait()
        self.seen.extend(tokens)
        return not self.error

    def validate_tokens(self, tokens: list[int]) -> int:
        return int(not self.is_stopped() and tokens == [len(self.seen)])

    def consume_token(self, token: int) -> bool:
        return self.consume_tokens([token])

    def is_stopped(self) -> bool:
        return bool(self.error) or len(self.seen) >= self.limit

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self.gate.wait()
        self.num_masks += 1
        words = (ctypes.c_uint32 * (num_bytes // 4)).from_address(address)
        token = self.end if self.is_stopped() and self.end is not None else len(self.seen)
        for index in range(len(words)):
            words[index] = 1 << token % 32 if index == token // 32 else 0

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error


def new_row(
    row: int,
    output: list[int],
    grammar: str | None = "counting",
    stop_ids: tuple[int, ...] = (30, 31),
    **params: Any,
) -> AdmittedRequest:
    tokens = np.array([7, 7, *output], dtype=np.int32)
    sampling = SamplingParams(grammar=Grammar(grammar, "tools") if grammar else None, **params)
    return AdmittedRequest(row, f"r{row}", tokens, 2, sampling, stop_ids, 0)


@pytest.fixture(autouse=True)
def wait_for_masks(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let steps wait for masks as long as a thread may take, or so many seconds; no grammar becomes slow by itself."""
    for name in ("grammar_rows", "row_grammar"):
        monkeypatch.setattr(f"tokenmill.model.sampling.{name}.SLOW_SECONDS", 60.0)

    def wait(seconds: float) -> None:
        monkeypatch.setattr("tokenmill.model.sampling.grammar_rows.PATIENCE", seconds)

    wait(60.0)
    return wait


@pytest.fixture
def template() -> Counting:
    return Counting()


@pytest.fixture
def rows(template: Counting) -> Iterator[GrammarRows]:
    rows = GrammarRows({"counting": template}.get, VOCAB_SIZE)
    yield rows
    template.gate.set()
    rows.close()


def step(rows: GrammarRows, *wanted: tuple[int, int]) -> GrammarStep:
    found = rows.step(np.array([row for row, _ in wanted]), np.array([position for _, position in wanted]))
    assert found is not None
    return found


def allowed(found: TokenBitmask | None) -> dict[int, set[int]]:
    if found is None:
        return {}
    flags = ~clear_bits_by_words(found.bits, VOCAB_SIZE)
    return {int(i): set(np.flatnonzero(row).tolist()) for i, row in zip(found.indices, flags, strict=True)}


def masks(now: GrammarStep) -> dict[int, set[int]]:
    """Return the tokens left by the masks that the rows of a step have by now."""
    return {**allowed(now.ready(HOST)), **allowed(now.deciding(np.zeros(0, dtype=np.int64)))}


def test_a_row_follows_its_output_and_forgets_its_former_owner(rows: GrammarRows) -> None:
    rows.set([new_row(0, [5, 5, 5]), new_row(1, [])])
    assert masks(step(rows, (0, 5), (1, 2))) == {0: {3}, 1: {0}}
    now = step(rows, (0, 5))
    now.ready(HOST)
    assert now.take_samples(np.array([3], dtype=np.int32)) == {}
    rows.set([new_row(1, [], grammar=None)])
    assert masks(step(rows, (0, 6), (1, 3))) == {0: {4}}
    rows.set([new_row(0, [9])])
    assert masks(step(rows, (0, 3))) == {0: {1}}
    assert rows.step(np.array([1]), np.array([3])) is None


def test_a_late_mask_costs_its_own_row_a_token_and_no_other(
    rows: GrammarRows, template: Counting, wait_for_masks: Callable[[float], None]
) -> None:
    rows.set([new_row(0, [])])
    assert masks(step(rows, (0, 2))) == {0: {0}}
    wait_for_masks(0.0)
    template.gate = threading.Event()  # of the copies that are made from now on
    rows.set([new_row(1, [])])
    now = step(rows, (0, 2), (1, 2))
    assert masks(now) == {0: {0}}
    token_ids = np.array([0, 33], dtype=np.int32)
    assert now.take_samples(token_ids) == {}
    assert token_ids.tolist() == [0, -1]
    # A step that was launched before that was known goes without too, though the mask is there now.
    template.gate.set()
    wait_for_masks(60.0)
    ahead = step(rows, (0, 3), (1, 3))
    ahead.ready(HOST)
    token_ids = np.array([1, 33], dtype=np.int32)
    ahead.take_samples(token_ids)
    assert token_ids.tolist() == [1, -1]
    assert masks(step(rows, (1, 2))) == {0: {0}}


def test_a_grammar_that_fails_says_so_and_its_row_goes_without(rows: GrammarRows, template: Counting) -> None:
    rows.set([new_row(0, []), new_row(1, [], grammar="gone")])
    masks(step(rows, (0, 2)))
    template.copies[0].error = "NoExtension"
    first = step(rows, (0, 2), (1, 2))
    first.ready(HOST)
    token_ids = np.array([0, 0], dtype=np.int32)
    assert first.take_samples(token_ids) == {1: "its grammar is gone"}
    second = step(rows, (0, 3), (1, 2))
    assert second.ready(HOST) is None
    token_ids = np.array([4, 4], dtype=np.int32)
    failures = second.take_samples(token_ids)
    assert "nothing matches" in failures[0]
    assert token_ids.tolist() == [-1, -1]


def test_stops_before_min_tokens_pass_only_where_nothing_else_does(rows: GrammarRows) -> None:
    rows.set([new_row(0, [], stop_ids=(0, 1), min_tokens=5), new_row(1, [5, 5], stop_ids=(0, 1), min_tokens=5)])
    # The only token that is allowed stays allowed.
    assert masks(step(rows, (0, 2), (1, 4))) == {0: {0}, 1: {2}}


@pytest.fixture
def host_rows(template: Counting) -> Iterator[GrammarRows]:
    rows = GrammarRows({"counting": template}.get, VOCAB_SIZE, on_host=True)
    yield rows
    rows.close()


def run(rows: GrammarRows, drawn: dict[tuple[int, int], int]) -> dict[int, set[int]]:
    """One step in which these (row, position) have drawn these tokens: what the refused ones are left with, taken."""
    now = step(rows, *drawn)
    assert now.ready(HOST) is None
    token_ids = np.array(list(drawn.values()), dtype=np.int32)
    again = allowed(now.deciding(token_ids))
    for index, left in again.items():
        token_ids[index] = min(left)
    assert now.take_samples(token_ids) == {}
    return again


def test_on_the_host_a_row_gets_a_mask_only_where_its_grammar_refuses_what_it_drew(
    host_rows: GrammarRows, template: Counting
) -> None:
    host_rows.set([new_row(0, []), new_row(1, [])])
    assert run(host_rows, {(0, 2): 0, (1, 2): 9}) == {1: {0}}
    assert run(host_rows, {(0, 3): 1, (1, 3): 1}) == {}
    assert run(host_rows, {(1, 4): 5}) == {0: {2}}
    assert [copy.seen for copy in template.copies] == [[0, 1], [0, 1, 2]]
    assert [copy.num_masks for copy in template.copies] == [0, 2]


def test_rows_with_filters_keep_their_masks_on_the_host(host_rows: GrammarRows) -> None:
    filters: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]
    host_rows.set([new_row(index, [], **one) for index, one in enumerate(filters)])
    for position in range(2, 5):
        now = step(host_rows, *((row, position) for row in range(3)))
        assert allowed(now.ready(HOST)) == {row: {position - 2} for row in range(3)}
        token_ids = np.full(3, position - 2, dtype=np.int32)
        assert now.deciding(token_ids) is None
        assert now.take_samples(token_ids) == {}


def test_a_resumed_row_replays_its_output_and_its_mask_only_decides(host_rows: GrammarRows, template: Counting) -> None:
    host_rows.set([new_row(0, [0, 1, 2]), new_row(1, [0, 1, 2]), new_row(2, [0, 1, 2], top_p=0.9)])
    now = step(host_rows, (0, 5), (1, 5), (2, 5))
    # A row without filters draws from the whole vocabulary, mask or none.
    assert allowed(now.ready(HOST)) == {2: {3}}
    token_ids = np.array([3, 9, 3], dtype=np.int32)
    assert allowed(now.deciding(token_ids)) == {1: {3}}
    token_ids[1] = 3
    assert now.take_samples(token_ids) == {}
    now = step(host_rows, (0, 6), (1, 6))
    assert now.ready(HOST) is None
    assert now.deciding(np.array([4, 4])) is None
    assert [copy.seen for copy in template.copies[:2]] == [[0, 1, 2, 3, 4]] * 2
    assert [copy.num_masks for copy in template.copies[:2]] == [1, 1]


def test_a_stop_before_min_tokens_is_taken_as_it_was_drawn_where_nothing_else_is_left(
    host_rows: GrammarRows, template: Counting
) -> None:
    early = {"stop_ids": (0, 1), "min_tokens": 5}
    host_rows.set([new_row(0, [], **early), new_row(1, [], **early)])
    # The first is the only token that is allowed, so it stays allowed: whoever drew it keeps it.
    assert run(host_rows, {(0, 2): 0, (1, 2): 5}) == {1: {0}}
    # It ends the request, so the matcher hears no more.
    assert [copy.seen for copy in template.copies] == [[], []]


def test_the_end_of_a_complete_output_is_what_its_mask_has_and_the_matcher_is_not_told(
    host_rows: GrammarRows, template: Counting
) -> None:
    """A matcher that has stopped takes nothing, and its mask has the ends of texts, not a client's stop ids."""
    template.limit = 2
    template.end = 31
    host_rows.set([new_row(0, [], stop_ids=(30, 31)), new_row(1, [], stop_ids=(30, 31))])
    assert run(host_rows, {(0, 2): 0, (1, 2): 0}) == {}
    assert run(host_rows, {(0, 3): 1, (1, 3): 1}) == {}
    assert run(host_rows, {(0, 4): 31, (1, 4): 30}) == {1: {31}}
    assert [copy.seen for copy in template.copies] == [[0, 1], [0, 1]]


def test_a_row_whose_grammar_has_become_slow_goes_back_to_masks_and_is_not_asked_meanwhile(
    host_rows: GrammarRows, template: Counting, wait_for_masks: Callable[[float], None]
) -> None:
    host_rows.set([new_row(0, []), new_row(1, [])])
    now = step(host_rows, (0, 2), (1, 2))
    now.ready(HOST)
    assert now.deciding(np.array([0, 0])) is None
    slow = host_rows._rows[0]
    slow.is_slow = True
    wait_for_masks(0.0)
    template.gate.clear()
    now.take_samples(np.array([0, 0], dtype=np.int32))
    # Its mask is being filled: it goes without a token, and the other is asked as before.
    now = step(host_rows, (0, 3), (1, 3))
    template.copies[1].gate = threading.Event()
    template.copies[1].gate.set()
    assert now.ready(HOST) is None
    token_ids = np.array([1, 1], dtype=np.int32)
    assert now.deciding(token_ids) is None
    assert now.take_samples(token_ids) == {}
    assert token_ids.tolist() == [-1, 1]
    template.gate.set()
    wait_for_masks(60.0)
    now = step(host_rows, (0, 3))
    now.ready(HOST)
    assert allowed(now.deciding(np.array([9]))) == {0: {1}}


def test_a_row_that_drew_first_and_whose_grammar_fails_says_so(host_rows: GrammarRows, template: Counting) -> None:
    host_rows.set([new_row(0, []), new_row(1, [])])
    template.copies[1].error = "NoExtension"
    now = step(host_rows, (0, 2), (1, 2))
    now.ready(HOST)
    token_ids = np.array([0, 0], dtype=np.int32)
    assert now.deciding(token_ids) is None
    assert "nothing matches" in now.take_samples(token_ids)[1]
    assert token_ids.tolist() == [0, -1]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 331, 4096])
def test_masks_are_applied_as_bits(vocab_size: int) -> None:
    words = -(-vocab_size // 32)
    bits = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64).to(torch.int32)
    expected = torch.tensor([[int(bits[i, t // 32]) >> t % 32 & 1 for t in range(vocab_size)] for i in range(3)]) == 0
    assert torch.equal(torch.from_numpy(clear_bits_by_bytes(bits.numpy(), vocab_size)), expected)
    assert torch.equal(clear_bits_by_words(bits, vocab_size), expected)
    logits = torch.randn(5, vocab_size)
    after = logits.clone()
    apply_bitmask(after, TokenBitmask(torch.tensor([4, 0, 2]), bits))
    for index, row in enumerate((4, 0, 2)):
        assert torch.equal(after[row], logits[row].masked_fill(expected[index], -torch.inf))
    assert torch.equal(after[[1, 3]], logits[[1, 3]])
    whole = logits[:3].clone()
    apply_bitmask(whole, TokenBitmask(torch.tensor([0, 1, 2]), bits))
    assert torch.equal(whole, logits[:3].masked_fill(expected, -torch.inf))


@every_isa
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 4099])
def test_native_masks_ban_what_the_reference_bans(isa, vocab_size, rng):
    memory = rng.normal(size=(2, 6, vocab_size + 5)).astype(np.float32)
    memory[:, 1, ::3], memory[:, 2, ::2] = np.nan, np.inf
    memory[1] = memory[0]
    expected, banned = memory[:, :, :vocab_size]
    bits = rng.integers(-(2**31), 2**31, size=(3, -(-vocab_size // 32)), dtype=np.int32)
    bits[0], bits[1] = 0, -1
    allowed = TokenBitmask(np.array([4, 1, 2]), bits)
    apply_bitmask(expected, allowed)
    apply_bitmask(banned, allowed, kernels(isa, 2))
    np.testing.assert_array_equal(banned, expected)
