"""Count the right drafts of a head on dialogues that it has not seen, depth by depth. Needs no engine.

What was answered is known, so drafting is walked through without the model: a draft is right where the answer has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from examples.train_eagle.batches import Batch, Vocabulary
from examples.train_eagle.features import Row
from examples.train_eagle.head import EagleHead
from torch import Tensor


@dataclass
class Verdict:
    """Counts of drafts of k tokens.

    Attributes:
        tried, right: drafts of each depth whose forerunners were right, and those of them that were right.
        steps, tokens: of a walk through all answers, which leaves out what was drafted right.
    """

    tried: list[int]
    right: list[int]
    steps: int = 0
    tokens: int = 0

    @classmethod
    def empty(cls, num_drafts: int) -> Verdict:
        """Return a verdict on nothing."""
        return cls([0] * num_drafts, [0] * num_drafts)

    @property
    def acceptance(self) -> list[float]:
        """Share of right drafts by depth, of those whose forerunners were right."""
        return [round(right / max(tried, 1), 3) for right, tried in zip(self.right, self.tried, strict=True)]

    @property
    def tokens_a_step(self) -> float:
        """Tokens of an answer for each step of the model, with k drafts a step."""
        return round(self.tokens / max(self.steps, 1), 3)

    def add(self, accepted: Tensor) -> None:
        """Count one answer of n tokens but its first.

        Args:
            accepted: [n], right drafts in a row from each place on.
        """
        for depth in range(len(self.tried)):
            before_the_end = accepted[: max(len(accepted) - depth, 0)]
            self.tried[depth] += int((before_the_end >= depth).sum())
            self.right[depth] += int((before_the_end > depth).sum())
        place = 0
        while place < len(accepted):
            place += 1 + int(accepted[place])
            self.steps += 1
        self.tokens += len(accepted)


@torch.inference_mode()
def judge(head: EagleHead, vocabulary: Vocabulary, embedding: Tensor, rows: Iterable[Row], num_drafts: int) -> Verdict:
    """Return the verdict on a head that drafts `num_drafts` tokens a step, greedily."""
    verdict = Verdict.empty(num_drafts)
    for row in rows:
        batch = Batch.of([row])
        hidden = head(batch.taps, embedding[batch.ids], num_drafts)
        drafts = torch.stack([vocabulary.ids[head.logits(one[0]).argmax(-1)] for one in hidden])
        for start, end in answers(row.is_answer):
            verdict.add(accepted_from(drafts, row.ids, start, end))
    return verdict


def answers(is_answer: Tensor) -> list[tuple[int, int]]:
    """Return [start, end) of each run of True."""
    edges = torch.diff(is_answer.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def accepted_from(drafts: Tensor, ids: Tensor, start: int, end: int) -> Tensor:
    """Return how many drafts in a row are right, [end - start - 1], once each token of an answer but the last is known.

    Args:
        drafts: [num_drafts, T]: of row p and depth j, the token p + 2 + j.
    """
    rows = torch.arange(start - 1, end - 2)
    accepted, goes_on = torch.zeros(len(rows), dtype=torch.long), torch.ones(len(rows), dtype=torch.bool)
    for depth, draft in enumerate(drafts):
        places = rows + 2 + depth
        goes_on = goes_on & (places < end) & (draft[rows] == ids[places.clamp(max=len(ids) - 1)])
        accepted += goes_on
    return accepted
