"""Trains a head by the training-time test: all depths of all rows at once, each against what the model says there.

Restarts from its checkpoint; the same seed takes the same batches. Knows no text and no formats of others.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from examples.train_eagle.batches import Batch, Vocabulary
from examples.train_eagle.features import Features, by_length
from examples.train_eagle.head import EagleHead
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The settings with which a head is trained.

    Attributes:
        depths: drafts in a row that are trained. decay: weight of a depth over that of the one before.
        batch_tokens: tokens of a step, padding included.
        rate: of AdamW, at its peak.
    """

    depths: int = 4
    decay: float = 0.8
    epochs: float = 4.0
    batch_tokens: int = 2048
    rate: float = 3e-4
    warm_up: float = 0.03
    clip: float = 0.5
    seed: int = 0


class Trainer:
    """One run, in a file; a run that is there is taken up again.

    Attributes:
        step: steps that are done.
    """

    def __init__(self, head: EagleHead, embedding: Tensor, teacher_head: Tensor, plan: Plan, path: Path) -> None:
        self.head, self.plan, self.step = head, plan, 0
        self._embedding, self._teacher_head, self._path = embedding, teacher_head, path
        self._optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        if path.exists():
            self._load()

    def train(self, features: Features, vocabulary: Vocabulary, total: int) -> Iterator[float]:
        """Take all steps that are left; yield each one's loss."""
        for numbers in self._batches(features, total):
            batch = Batch.of([features[number] for number in numbers]).known_to(vocabulary)
            yield self._take_step(batch, vocabulary, total)

    def num_steps(self, features: Features) -> int:
        """Return how many steps the plan's epochs are."""
        return round(self.plan.epochs * len(by_length(features.lengths, self.plan.batch_tokens)))

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        moments = {
            f"{name}/{key}": value
            for name, parameter in self.head.named_parameters()
            for key, value in self._optimizer.state[parameter].items()
        }
        told = {"step": str(self.step), "plan": json.dumps(asdict(self.plan))}
        save_file(self.head.state_dict() | moments, self._path.with_suffix(".tmp"), metadata=told)
        self._path.with_suffix(".tmp").replace(self._path)

    def _load(self) -> None:
        with safe_open(self._path, "pt") as file:
            told = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        if json.loads(told["plan"]) != asdict(self.plan):
            raise SystemExit(f"{self._path} was begun by another plan; take another folder, or remove it")
        self.step = int(told["step"])
        self.head.load_state_dict({name: tensors[name] for name in self.head.state_dict()})
        for name, parameter in self.head.named_parameters():
            keys = [key for key in tensors if key.startswith(f"{name}/")]
            self._optimizer.state[parameter] = {key.rpartition("/")[2]: tensors[key] for key in keys}

    def _batches(self, features: Features, total: int) -> Iterator[list[int]]:
        step = 0
        for epoch in range(math.ceil(self.plan.epochs)):
            batches = by_length(features.lengths, self.plan.batch_tokens)
            random.Random(f"{self.plan.seed}-{epoch}").shuffle(batches)
            for numbers in batches:
                if self.step <= step < total:
                    yield numbers
                step += 1

    def _take_step(self, batch: Batch, vocabulary: Vocabulary, total: int) -> float:
        with torch.no_grad():
            wanted = torch.softmax(batch.final[batch.rows, batch.columns] @ self._teacher_head.T, -1)
        hidden = self.head(batch.taps, self._embedding[batch.ids], self.plan.depths)
        losses = [self._loss(batch.at_depth(one, depth), wanted) for depth, one in enumerate(hidden)]
        loss = sum(self.plan.decay**depth * one for depth, one in enumerate(losses))
        assert isinstance(loss, Tensor), "at least one depth"
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.plan.clip)
        self._optimizer.param_groups[0]["lr"] = self.plan.rate * self._rate_at(self.step / total)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return losses[0].item()

    def _loss(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean cross entropy of drafts from the model's own distribution over the draft vocabulary."""
        return F.cross_entropy(self.head.logits(hidden), wanted)

    def _rate_at(self, share: float) -> float:
        """Return the rate after a share of the steps, of its peak: a rise, then half a cosine down to a twentieth."""
        if share < self.plan.warm_up:
            return max(share, 1e-3) / self.plan.warm_up
        done = (share - self.plan.warm_up) / (1 - self.plan.warm_up)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
