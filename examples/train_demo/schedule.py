"""The training schedule: phases of steps, each with its learning rate, row length and mixture of skills.

The schedule is a TOML file beside this module, so that a run is reproducible from it and its seed; a mixture changed
while training is a new phase, never an edit of an old one.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from data import Mix


@dataclass(frozen=True)
class Phase:
    """``steps`` steps at rates from ``rate[0]`` to ``rate[1]`` (linear) on one mix."""

    name: str
    steps: int
    rate: tuple[float, float]
    batch_tokens: int
    mix: Mix

    def rate_at(self, step: int) -> float:
        """Learning rate at ``step`` of this phase."""
        low, high = self.rate
        return low + (high - low) * step / max(1, self.steps - 1)


@dataclass(frozen=True)
class Schedule:
    """A seed and the phases in order."""

    seed: int
    phases: tuple[Phase, ...]

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)


def read_schedule(path: Path) -> Schedule:
    """Read a schedule file; weights not named in a phase are taken from ``[weights]``."""
    table = tomllib.loads(path.read_text())
    phases = []
    for entry in table["phase"]:
        weights = {**table["weights"], **entry.get("weights", {})}
        mix = Mix(weights, entry["max_length"], entry["chat_share"])
        start, end = entry["rate"]
        phases.append(Phase(entry["name"], entry["steps"], (start, end), entry["batch_tokens"], mix))
    return Schedule(table["seed"], tuple(phases))
