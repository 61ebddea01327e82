"""A runner without a model whose answers prove that every page held the right tokens.

Its KV memory stores token ids. The "model" reads a request's whole context back through the page table and hashes it,
so the token sequence of a request is a pure function of its prompt exactly if no page was ever shared wrongly, freed
too early, or read before it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from tokenmill.core.plan import AdmittedRequest, Logprob, StepOutcome, StepPlan, StepResult, TokenLogprobs
from tokenmill.engine.kv.window_pages import WindowSettings

VOCAB_SIZE = 50


def next_token(context: np.ndarray) -> int:
    """Return the token that follows a context: a hash of all of it."""
    value = 0
    for token in context.tolist():
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB_SIZE


def expected_output(prompt: list[int], max_tokens: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """Return the output of a request by definition, without pages, batches or steps."""
    context = list(prompt)
    while len(context) - len(prompt) < max_tokens:
        context.append(next_token(np.array(context)))
        if context[-1] in stop_ids:
            break
    return context[len(prompt) :]


def result_of(plan: StepPlan, brought: list[list[int]], **more: Any) -> StepResult:
    """Return the outcome of a step that brings each request of the batch these tokens."""
    starts = np.cumsum([0, *map(len, brought)], dtype=np.int32)
    return StepResult(plan.step, np.array([*chain(*brought)], dtype=np.int32), starts, **more)


class WindowMemory:
    """The memory of layers with a window, and its page table: tokens behind a window are never read."""

    def __init__(self, num_rows: int, page_size: int, max_len: int, settings: WindowSettings) -> None:
        self.page_size, self.window = page_size, settings.window
        self.memory = np.full((settings.num_pages + 1, page_size), -1, dtype=np.int64)
        self.page_table = np.zeros((num_rows, -(-max_len // page_size)), dtype=np.int64)

    def execute(self, plan: StepPlan, token_table: np.ndarray) -> None:
        """Write the step's tokens to their slots."""
        if (entries := plan.window_pages) is not None:
            self.page_table[entries.rows, entries.numbers] = entries.ids
        for row, start, count in zip(plan.rows, plan.num_computed, plan.num_scheduled, strict=True):
            for position in range(start, start + count):
                page = self.page_table[row, position // self.page_size]
                assert page > 0, "a token is written to the reserved window page"
                self.memory[page, position % self.page_size] = token_table[row, position]

    def overwrite(self, context: np.ndarray, row: int, start: int, end: int) -> None:
        """Put what the windows of the tokens from `start` to `end` see into a context."""
        for position in range(max(0, start - self.window + 1), end):
            page = self.page_table[row, position // self.page_size]
            context[position] = self.memory[page, position % self.page_size]


class PagedMemoryRunner:
    """Runs a plan at once on numpy arrays. A step whose number is in `failing_steps` raises."""

    def __init__(
        self,
        num_rows: int,
        num_pages: int,
        page_size: int,
        max_len: int,
        has_states: bool = False,
        window: WindowSettings | None = None,
    ) -> None:
        self.page_size = page_size
        self.windows = None if window is None else WindowMemory(num_rows, page_size, max_len, window)
        self.memory = np.full((num_pages + 1, page_size), -1, dtype=np.int64)
        self.page_table = np.zeros((num_rows, -(-max_len // page_size)), dtype=np.int64)
        self.token_table = np.zeros((num_rows, max_len + 1), dtype=np.int64)
        self.failing_steps: set[int] = set()
        self.has_failed = False
        self.plans: list[StepPlan] = []
        self.told: list[Callable[[StepPlan], None]] = []  # of each plan
        self.starts: list[Any] = []
        self.owners: dict[int, AdmittedRequest] = {}
        self.num_late = 0
        self.encoded: set[str] = set()
        self.has_states = has_states
        self.states: dict[int, list[int]] = {}
        self.state_slots: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Run the step. Behind a failed step all are refused until `recover`."""
        self.plans.append(plan)
        for tell in self.told:
            tell(plan)
        try:
            if self.has_failed:
                raise RuntimeError("a step before this one failed")
            result = self.execute(plan)
        except RuntimeError as error:
            self.has_failed = True
            return StepOutcome.failed(error)
        return StepOutcome(lambda: result)

    def recover(self) -> None:
        """Run plans again."""
        self.has_failed = False

    def execute(self, plan: StepPlan) -> StepResult:
        """Write the step's tokens to their slots, then sample from the contexts as the pages have them."""
        if plan.step in self.failing_steps:
            raise RuntimeError(f"step {plan.step} fails as planned")
        ordered = {*plan.encode, *plan.load}
        assert len(ordered) == len(plan.encode) + len(plan.load), "an image is encoded and loaded"
        assert not self.encoded & ordered, "an image is encoded whose output is there"
        self.encoded = (self.encoded - set(plan.forget)) | ordered
        for new in plan.new_rows:
            self.owners[new.row] = new
            self.token_table[new.row, : len(new.token_ids)] = new.token_ids
        self.page_table[plan.page_rows, plan.page_numbers] = plan.page_ids
        if plan.page_copies is not None:
            self.copy_pages(plan.page_copies)
        self.enter_drafts(plan)
        if self.windows is not None:
            self.windows.execute(plan, self.token_table)
        assert self.windows is not None or plan.window_pages is None, "window pages without a window group"
        if self.has_states:
            self.run_states(plan)
        for row, start, count in zip(plan.rows, plan.num_computed, plan.num_scheduled, strict=True):
            for span in self.owners[row].media:
                is_needed = span.offset < start + count and span.end > start
                assert not is_needed or span.digest in self.encoded, "a step without the output of its image"
            for position in range(start, start + count):
                page = self.page_table[row, position // self.page_size]
                assert page > 0, "a token is written to the reserved page"
                self.memory[page, position % self.page_size] = self.token_table[row, position]
        brought = [self.sample(plan, index) for index in range(len(plan.rows))]
        if self.has_states:
            for row, tokens in zip(plan.rows.tolist(), brought, strict=True):
                self.states[self.state_slots[row]] += tokens[:-1]  # drafts that were right
        logprobs, vectors = self.reports(plan)
        result = result_of(plan, brought, prompt_logprobs=logprobs, embeddings=vectors)
        self.starts.append(result.token_starts)
        return result

    def copy_pages(self, copies: np.ndarray) -> None:
        """Copy pages one after the other, [source, target] of the full group, then of the windows if there are some."""
        for source, target, *beside in copies.T.tolist():
            self.memory[target] = self.memory[source]
            if self.windows is not None:
                window_source, window_target = beside
                self.windows.memory[window_target] = self.windows.memory[window_source]

    def run_states(self, plan: StepPlan) -> None:
        """Run "recurrent states": each is the tokens that it has seen, exactly those before the step's; no drafts."""
        loads, saves = [], {}
        if plan.states is not None:
            loads = [*zip(plan.states.load_slots.tolist(), plan.states.load_sources.tolist(), strict=True)]
            columns = (plan.states.save_rows, plan.states.save_ends, plan.states.save_slots)
            saves = {row: (end, slot) for row, end, slot in zip(*(column.tolist() for column in columns), strict=True)}
        self.states |= {slot: [] if source < 0 else list(self.states[source]) for slot, source in loads}
        self.state_slots |= {new.row: new.state_slot for new in plan.new_rows}
        counts = plan.num_scheduled - (plan.num_samples - 1).clip(min=0)
        for row, start, count in zip(plan.rows.tolist(), plan.num_computed, counts, strict=True):
            state, end = self.states[self.state_slots[row]], start + count
            assert state == self.token_table[row, :start].tolist(), "a state that has seen other tokens"
            state += self.token_table[row, start:end].tolist()
            if row in saves:
                kept, slot = saves.pop(row)
                assert start < kept <= end, "a state is kept that the step does not pass"
                assert kept % self.page_size == 0, "a state is kept inside a page"
                self.states[slot] = state[:kept]
        assert not saves, "a state of no request is kept"

    def enter_drafts(self, plan: StepPlan) -> None:
        """Write draft tokens to the token table, behind the last known token."""
        drafts = iter([] if plan.draft_ids is None else plan.draft_ids.tolist())
        ends = plan.num_computed + plan.num_scheduled
        for row, end, count in zip(plan.rows, ends, plan.num_samples, strict=True):
            for position in range(end - count + 1, end):
                self.token_table[row, position] = next(drafts)
        assert next(drafts, None) is None, "a draft of no request"

    def sample(self, plan: StepPlan, index: int) -> list[int]:
        """Return the tokens that a request is brought: its drafts as long as they are right, and one that follows."""
        row, end = plan.rows[index], plan.num_computed[index] + plan.num_scheduled[index]
        context = self.memory[self.page_table[row, : -(-end // self.page_size)]].reshape(-1)
        if self.windows is not None:
            self.windows.overwrite(context, row, plan.num_computed[index], end)
        tokens: list[int] = []
        for position in range(end - plan.num_samples[index] + 1, end + 1):
            token = next_token(context[:position])
            is_draft = position < end and self.token_table[row, position] == token
            self.token_table[row, position] = token
            tokens.append(token)
            if not is_draft:
                break
        return tokens

    def reports(self, plan: StepPlan) -> tuple[dict[int, list[TokenLogprobs]], dict[int, bytes]]:
        """Return a step's reports on prompts: a "log probability" is a token's position, a "vector" the length run."""
        logprobs, vectors = {}, {}
        for index, (row, start, count) in enumerate(zip(plan.rows, plan.num_computed, plan.num_scheduled, strict=True)):
            owner, end = self.owners[int(row)], int(start + count)
            if owner.params.prompt_logprobs is not None and start < owner.num_prompt_tokens:
                told = range(int(start) + 1, min(end + 1, owner.num_prompt_tokens))
                logprobs[index] = [TokenLogprobs(Logprob(int(owner.token_ids[p]), p, 1), []) for p in told]
            if owner.pooling is not None and end == owner.num_prompt_tokens:
                vectors[index] = end.to_bytes(4, "little")
        return logprobs, vectors

    def close(self) -> None:
        """Do nothing: no step is running."""
