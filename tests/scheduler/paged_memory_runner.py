"""A runner without a model whose answers prove that every page held the right tokens.

Its KV memory stores token ids. The "model" reads a request's whole context back through the page table and hashes it,
so the token sequence of a request is a pure function of its prompt exactly if no page was ever shared wrongly, freed
too early, or read before it was written.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from tokenmill.scheduler.plan import StepPlan, StepResult

VOCAB_SIZE = 50


def next_token(context: np.ndarray) -> int:
    """The token that follows a context: a hash of all of it."""
    value = 0
    for token in context.tolist():
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB_SIZE


def expected_output(prompt: list[int], max_tokens: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """The output of a request by definition, without pages, batches or steps."""
    context = list(prompt)
    while len(context) - len(prompt) < max_tokens:
        context.append(next_token(np.array(context)))
        if context[-1] in stop_ids:
            break
    return context[len(prompt) :]


class PagedMemoryRunner:
    """Runs a plan at once on numpy arrays. A step whose number is in `failing_steps` raises."""

    def __init__(self, num_rows: int, num_pages: int, page_size: int, max_len: int) -> None:
        self.page_size = page_size
        self.memory = np.full((num_pages + 1, page_size), -1, dtype=np.int64)
        self.page_table = np.zeros((num_rows, -(-max_len // page_size)), dtype=np.int64)
        self.token_table = np.zeros((num_rows, max_len + 1), dtype=np.int64)
        self.failing_steps: set[int] = set()
        self.has_failed = False
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Run the step; the future holds its outcome. Behind a failed step all are refused until `recover`."""
        self.plans.append(plan)
        future: Future[StepResult] = Future()
        try:
            if self.has_failed:
                raise RuntimeError("a step before this one failed")
            future.set_result(self.execute(plan))
        except RuntimeError as error:
            self.has_failed = True
            future.set_exception(error)
        return future

    def recover(self) -> None:
        """Run plans again."""
        self.has_failed = False

    def execute(self, plan: StepPlan) -> StepResult:
        """Write the step's tokens to their slots, then sample from the contexts as the pages have them."""
        if plan.step in self.failing_steps:
            raise RuntimeError(f"step {plan.step} fails as planned")
        for new in plan.new_rows:
            self.token_table[new.row, : len(new.token_ids)] = new.token_ids
        self.page_table[plan.page_rows, plan.page_numbers] = plan.page_ids
        token_ids = np.full(len(plan.rows), -1, dtype=np.int32)
        for row, start, count in zip(plan.rows, plan.num_computed, plan.num_scheduled, strict=True):
            for position in range(start, start + count):
                page = self.page_table[row, position // self.page_size]
                assert page > 0, "a token is written to the reserved page"
                self.memory[page, position % self.page_size] = self.token_table[row, position]
        for index, (row, end) in enumerate(zip(plan.rows, plan.num_computed + plan.num_scheduled, strict=True)):
            if plan.samples[index]:
                pages = self.page_table[row, : -(-end // self.page_size)]
                token = next_token(self.memory[pages].reshape(-1)[:end])
                self.token_table[row, end] = token
                token_ids[index] = token
        return StepResult(plan.step, token_ids, {})

    def close(self) -> None:
        """Nothing is running."""
