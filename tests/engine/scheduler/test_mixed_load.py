"""Generation and vectors in one engine: neither load doubles the steps that the slowest requests of the other take."""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduler.harness import Harness
from tests.seeding import seed_for

SEED = seed_for(__name__)
STEPS = 150
TOKENS = 24


class Load:
    """Requests that come at drawn steps, and the steps that each takes."""

    def __init__(self, kinds: str, policy: str, depth: int) -> None:
        settings = {"num_pages": 4000, "page_size": 16, "max_num_seqs": 64, "budget": 128, "max_model_len": 640}
        self._harness = Harness(policy=policy, depth=depth, **settings)
        self._kinds = kinds
        self._came: dict[str, tuple[str, int]] = {}
        self.took: dict[str, list[int]] = {"generation": [], "vectors": []}

    def run(self) -> Load:
        """Run until nothing is left. The draws of a kind do not depend on whether the other is there."""
        chats, texts = random.Random(SEED), random.Random(SEED + 1)
        for step in range(STEPS):
            if chats.random() < 0.2:
                self._add("generation", [chats.randrange(50) for _ in range(chats.randint(5, 60))], step)
            for _ in range(texts.choice((0, 0, 1, 6))):  # calls of six texts, which take a third of all budgets
                self._add("vectors", [texts.randrange(50) for _ in range(texts.randint(5, 40))], step)
            self._step(step)
        step = STEPS
        while self._harness.engine.has_work:
            self._step(step)
            step += 1
        return self

    def _add(self, kind: str, prompt: list[int], step: int) -> None:
        if kind not in self._kinds:
            return
        if kind == "generation":
            request = self._harness.add(prompt, TOKENS, tenant="chat", ignore_eos=True)
        else:
            request = self._harness.add(prompt, 1, tenant="index", pooling="mean", ignore_eos=True)
        self._came[request] = kind, step

    def _step(self, step: int) -> None:
        self._harness.step()
        for request, (kind, came) in list(self._came.items()):
            if self._harness.records[request].finish_reason is not None:
                self.took[kind].append(step + 1 - came)
                del self._came[request]

    def p99(self, kind: str) -> int:
        """Steps that all but a hundredth of a kind's requests took at most."""
        took = sorted(self.took[kind])
        return took[-1 - len(took) // 100]


@pytest.mark.parametrize(("policy", "depth"), [("fcfs", 2), ("fair", 1)])
def test_neither_load_doubles_the_slowest_requests_of_the_other(policy: str, depth: int) -> None:
    print(f"seed {SEED}")
    both = Load("generation vectors", policy, depth).run()
    for kind in ("generation", "vectors"):
        alone = Load(kind, policy, depth).run()
        assert len(alone.took[kind]) == len(both.took[kind]) > 10
        assert both.p99(kind) <= 2 * alone.p99(kind), kind


def test_a_backlog_of_texts_leaves_every_generation_its_token_a_step() -> None:
    rng = random.Random(SEED)
    harness = Harness(
        policy="fair", num_pages=4000, page_size=16, max_num_seqs=64, budget=128, max_model_len=640, depth=1
    )
    chats = [harness.add([n] * 8, 40, tenant="chat", ignore_eos=True) for n in range(6)]
    harness.step()
    for _ in range(400):
        harness.add([rng.randrange(50) for _ in range(60)], 1, tenant="index", pooling="mean", ignore_eos=True)
    before = {chat: len(harness.records[chat].tokens) for chat in chats}
    for count in range(1, 31):
        harness.step()
        assert {chat: len(harness.records[chat].tokens) for chat in chats} == {
            chat: told + count for chat, told in before.items()
        }
    done = sum(record.finish_reason is not None for record in harness.records.values())
    assert done >= 30 * (128 - 6) // 60 - 2, "and the rest of every step is the texts'"
