"""Hidden states of dialogues, kept in files that are mapped into memory: one beside each file of text.

A token takes four times the hidden size in bfloat16: 4.6 KB for SmolLM2 135M. Knows no heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from examples.train_eagle.dialogues import Dialogue, read
from examples.train_eagle.teacher import Teacher
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

# Tokens, padding included, that the model runs at once.
BATCH_TOKENS = 1024
NAMES = ("taps", "final", "best", "ids", "is_answer", "starts")


@dataclass(frozen=True)
class Row:
    """One dialogue of T tokens with what the model made of it; see `Hidden`.

    Attributes:
        ids: [T] int64. is_answer: [T] bool, the tokens that the model answered.
        best: [T] int64, the most likely next token where that is part of an answer; 0 elsewhere.
    """

    ids: Tensor
    is_answer: Tensor
    taps: Tensor
    final: Tensor
    best: Tensor

    def __len__(self) -> int:
        return len(self.ids)


def write_features(teacher: Teacher, text: Path, target: Path) -> None:
    """Run the dialogues of a file through the model and write what comes of them, whole or not at all."""
    dialogues = [dialogue for dialogue in read(text) if dialogue.answers]
    parts: dict[int, dict[str, Tensor]] = {}
    for numbers in by_length([len(dialogue.ids) for dialogue in dialogues], BATCH_TOKENS):
        batch = [dialogues[number] for number in numbers]
        for number, dialogue, hidden in zip(numbers, batch, teacher.hidden([one.ids for one in batch]), strict=True):
            is_answer = _is_answer(dialogue)
            before, best = is_answer.roll(-1), torch.zeros(len(is_answer), dtype=torch.int32)
            best[before] = teacher.best(hidden.final[before]).int()
            parts[number] = {
                "taps": hidden.taps.bfloat16(),
                "final": hidden.final.bfloat16(),
                "best": best,
                "ids": torch.tensor(dialogue.ids, dtype=torch.int32),
                "is_answer": is_answer,
            }
    tensors = {name: torch.cat([parts[number][name] for number in sorted(parts)]) for name in NAMES[:-1]}
    lengths = torch.tensor([0, *(len(dialogue.ids) for dialogue in dialogues)])
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, "starts": lengths.cumsum(0)}, target.with_suffix(".tmp"))
    target.with_suffix(".tmp").replace(target)


def _is_answer(dialogue: Dialogue) -> Tensor:
    is_answer = torch.zeros(len(dialogue.ids), dtype=torch.bool)
    for start, end in dialogue.answers:
        is_answer[start:end] = True
    return is_answer


def by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return the numbers of rows in batches of similar lengths, each of at most so many tokens with its padding."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


class Features:
    """All dialogues of some files of `write_features`; a row is read from the file when it is asked for.

    Attributes:
        lengths: tokens of each dialogue.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files, self._places, self.lengths = [], [], []
        for number, path in enumerate(paths):
            file = safe_open(path, framework="pt")
            starts = file.get_tensor("starts").tolist()
            self._files.append({name: file.get_slice(name) for name in NAMES[:-1]})
            self._places += [(number, start, end) for start, end in itertools.pairwise(starts)]
            self.lengths += [end - start for start, end in itertools.pairwise(starts)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Row:
        number, start, end = self._places[index]
        own = {name: part[start:end] for name, part in self._files[number].items()}
        return Row(own["ids"].long(), own["is_answer"], own["taps"].float(), own["final"].float(), own["best"].long())

    def rows(self) -> Iterator[Row]:
        """Yield all rows."""
        return (self[index] for index in range(len(self)))

    def answer_tokens(self) -> Tensor:
        """Return the ids of all tokens of answers, in no order."""
        parts = [(file["ids"][:], file["is_answer"][:]) for file in self._files]
        return torch.cat([ids[is_answer].long() for ids, is_answer in parts])
