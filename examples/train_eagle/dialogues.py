"""Dialogues as token ids, and the files that hold them: one JSON line each, a file for each round of writing.

Knows no model: what a chat template puts around the turns is found by rendering it once with marks for contents.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.core.whole_file import whole_file

_MARKS = ("@first@", "@second@", "@third@")


@dataclass
class Dialogue:
    """One conversation.

    Attributes:
        ids: all tokens, those of the template among them.
        answers: [start, end) of the tokens that the model answered, ends of turns included.
        temperature: at which it answered.
    """

    ids: list[int]
    answers: list[tuple[int, int]] = field(default_factory=list)
    temperature: float = 0.0

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens that a head could have drafted."""
        return sum(end - start for start, end in self.answers)

    def cut(self, length: int) -> Dialogue:
        """Return the first `length` tokens as a dialogue."""
        spans = [(start, min(end, length)) for start, end in self.answers if start < length]
        return Dialogue(self.ids[:length], spans, self.temperature)


@dataclass(frozen=True)
class Frame:
    """Tokens that a chat template puts around turns.

    Attributes:
        opening: before the first user's text. answer: between a user's text and the answer. next: between an answer
            without its end and the next user's text.
        end: the last token of an answer, with which `next` begins.
    """

    opening: list[int]
    answer: list[int]
    next: list[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:
        """Return the frame of a tokenizer's template."""
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        rest = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pieces = []
        for mark in _MARKS:
            piece, found, rest = rest.partition(mark)
            if not found:
                raise SystemExit(
                    "the chat template changes what users say, so that no turn can be written from its frame"
                )
            pieces.append(tokenizer.encode(piece, add_special_tokens=False))
        opening, answer, following = pieces
        return cls(opening, answer, following, following[0])


def write(path: Path, dialogues: Sequence[Dialogue]) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write("".join(json.dumps(asdict(dialogue)) + "\n" for dialogue in dialogues).encode())


def read(path: Path) -> list[Dialogue]:
    """Return the dialogues of a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Dialogue(row["ids"], [(a, b) for a, b in row["answers"]], row["temperature"]) for row in rows]
