"""The text that a head learns from: the model writes it, users' turns too.

What follows the template's opening of a user's turn is a question of the model's own (Magpie, arXiv 2406.08464); some
first turns are written by hand (prompts.txt). Answers are drawn at temperature 0.7 for half of the dialogues and are
greedy for the rest. Knows no heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.train_eagle.dialogues import Dialogue, Frame, read, write

from tokenmill import LLM, SamplingParams

HERE = Path(__file__).parent
BY_HAND = (HERE / "prompts.txt").read_text().splitlines()
# Of a round's dialogues, every so many begins with a turn written by hand.
HAND_EVERY = 4
USER_TEMPERATURE, USER_TOP_P = 1.0, 0.9
LONGEST_QUESTION = 128


@dataclass(frozen=True)
class Lengths:
    """Limits of what is written.

    Attributes:
        streams: dialogues that are written side by side; also those of a file.
        answer: tokens of an answer. dialogue: of a whole one.
        turns: questions of every second dialogue; the others have one.
    """

    streams: int = 64
    answer: int = 256
    dialogue: int = 640
    turns: int = 2


class Writer:
    """Writes rounds of dialogues; the same seed and round give the same text."""

    def __init__(self, llm: LLM, lengths: Lengths, seed: int = 0) -> None:
        self._llm, self._lengths, self._seed = llm, lengths, seed
        self.frame = Frame.of(llm.get_tokenizer())

    def write_round(self, number: int) -> list[Dialogue]:
        """Return one round's dialogues, without those whose first question came to no end."""
        lengths = self._lengths
        dialogues = [Dialogue(list(self.frame.opening), [], 0.7 * (row % 2)) for row in range(lengths.streams)]
        asked = self._first_turns(dialogues, number)
        for turn in range(lengths.turns):
            if turn:
                # Rows 0 and 1 of each four go on: both temperatures have dialogues of several turns.
                asked = [row for row in asked if row % 4 < 2 and dialogues[row].ids[-1] == self.frame.end]
                for row in asked:
                    dialogues[row].ids += self.frame.next[1:]
                asked = self._ask(dialogues, asked, number, turn)
            self._answer(dialogues, asked, number, turn)
        return [dialogue for dialogue in dialogues if dialogue.answers]

    def answer_turns(self, turns: Sequence[Sequence[str]], temperature: float) -> list[Dialogue]:
        """Return dialogues with these users' turns, answered in order."""
        encode = self._llm.get_tokenizer().encode
        dialogues = [Dialogue(list(self.frame.opening), [], temperature) for _ in turns]
        for turn in range(max(map(len, turns))):
            rows = [row for row, own in enumerate(turns) if turn < len(own)]
            for row in rows:
                before = self._between(dialogues[row]) if turn else []
                dialogues[row].ids += [*before, *encode(turns[row][turn], add_special_tokens=False)]
            self._answer(dialogues, rows, 0, turn)
        return dialogues

    def _between(self, dialogue: Dialogue) -> list[int]:
        return self.frame.next[1:] if dialogue.ids[-1] == self.frame.end else self.frame.next

    def _first_turns(self, dialogues: list[Dialogue], number: int) -> list[int]:
        rows = range(len(dialogues))
        by_hand = [row for row in rows if BY_HAND and row % HAND_EVERY == HAND_EVERY - 1 - number % 2]
        encode = self._llm.get_tokenizer().encode
        for place, row in enumerate(by_hand):
            text = BY_HAND[(number * len(by_hand) + place) % len(BY_HAND)]
            dialogues[row].ids += encode(text, add_special_tokens=False)
        return sorted([*by_hand, *self._ask(dialogues, sorted(set(rows) - set(by_hand)), number, 0)])

    def _ask(self, dialogues: list[Dialogue], rows: list[int], number: int, turn: int) -> list[int]:
        """Let the model write users' turns; return the rows in which it came to an end."""
        asked = []
        for row, ids in zip(rows, self._generate(dialogues, rows, number, 2 * turn, LONGEST_QUESTION), strict=True):
            if len(ids) > 1 and ids[-1] == self.frame.end:
                dialogues[row].ids += ids[:-1]
                asked.append(row)
        return asked

    def _answer(self, dialogues: list[Dialogue], rows: list[int], number: int, turn: int) -> None:
        room = self._lengths.dialogue - len(self.frame.answer) - self._lengths.answer
        rows = [row for row in rows if len(dialogues[row].ids) < room]
        for row in rows:
            dialogues[row].ids += self.frame.answer
        answers = self._generate(dialogues, rows, number, 2 * turn + 1, self._lengths.answer)
        for row, ids in zip(rows, answers, strict=True):
            dialogue = dialogues[row]
            dialogue.answers.append((len(dialogue.ids), len(dialogue.ids) + len(ids)))
            dialogue.ids += ids

    def _generate(
        self, dialogues: list[Dialogue], rows: list[int], number: int, part: int, max_tokens: int
    ) -> Iterator[list[int]]:
        is_question = part % 2 == 0
        params = [
            SamplingParams(
                temperature=USER_TEMPERATURE if is_question else dialogues[row].temperature,
                top_p=USER_TOP_P if is_question else 1.0,
                max_tokens=max_tokens,
                seed=((self._seed * 100_000 + number) * 10 + part) * 1000 + row,
            )
            for row in rows
        ]
        prompts = [{"prompt_token_ids": list(dialogues[row].ids)} for row in rows]
        outputs = self._llm.generate(prompts, params, use_tqdm=False) if prompts else []
        return (list(output.outputs[0].token_ids) for output in outputs)


def write_until(writer: Writer, folder: Path, num_tokens: int) -> Iterator[int]:
    """Write rounds into a folder until it has so many answer tokens; yield the number so far.

    Rounds that are there stay.
    """
    done = number = 0
    while done < num_tokens:
        path = folder / f"{number:05}.jsonl"
        if not path.exists():
            write(path, writer.write_round(number))
        done += sum(dialogue.num_answer_tokens for dialogue in read(path))
        number += 1
        yield done


def held_out_turns() -> list[list[str]]:
    """Return the users' turns of the chats that no head is trained on."""
    return [line.split(" | ") for line in (HERE / "held_out.txt").read_text().splitlines()]
