"""Measure held-out greedy accuracy by skill, through TokenMill (or transformers), and print it as a table.

python evaluate.py                                # the bundled model, through TokenMill
python evaluate.py --backend transformers         # the same prompts through transformers
python evaluate.py --free                         # also requests in free words, with the replies
python evaluate.py --card                         # also write table, stories and free requests into the model's card
python evaluate.py --same-as-transformers 40      # in float32 both backends must give the same tokens
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card import FreeReply, free_lines, write_card
from data import Encoder
from free_phrasings import FREE, is_good
from grading import is_right
from rich.console import Console
from rich.progress import track
from rich.table import Table
from skills import SKILLS, Message, Sample, assistant, user
from skills.recall import recall

DEFAULT_MODEL = Path(__file__).parents[2] / "src" / "tokenmill" / "demo" / "model"
COUNTING = ("counting", "counting one kind")


@dataclass(frozen=True)
class Answer:
    """The answer of a backend to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    ended: bool


def far_recall(rng: random.Random, minimum_characters: int = 3800) -> Sample:
    """A recall over a conversation of more than about 1,200 tokens, fact first, question last."""

    def filler(rng: random.Random, split: Any) -> list[Message]:
        pick = rng.choice(("copy", "reverse", "compare", "faq", "scope", "arithmetic"))
        return list(SKILLS[pick](rng, split).messages[:2])

    while True:
        sample = recall(rng, "heldout", filler, 24)
        length = sum(len(m["content"]) + 20 for m in sample.messages)
        if minimum_characters <= length <= minimum_characters + 600:
            return sample


def heldout(count: int, seed: int) -> dict[str, list[Sample]]:
    """``count`` held-out samples of every skill, and as many long recalls."""
    groups: dict[str, list[Sample]] = {}
    for name, generate in SKILLS.items():
        rng = random.Random(f"evaluate-{seed}-{name}")
        while True:  # one generator may serve two skills: draw until each of them has enough
            sample = generate(rng, "heldout")
            group = groups.setdefault(sample.skill, [])
            if len(group) < count:
                group.append(sample)
            elif name != "count" or all(len(groups.get(skill, ())) >= count for skill in COUNTING):
                break
    rng = random.Random(f"evaluate-{seed}-far")
    groups["recall over long chats"] = [far_recall(rng) for _ in range(max(1, count // 4))]
    return groups


def with_tokenmill(model: Path, prompts: list[list[int]], max_tokens: int, dtype: str) -> list[Answer]:
    """Greedy answers through TokenMill's offline ``LLM``."""
    from tokenmill import LLM, SamplingParams

    llm = LLM(str(model), dtype=dtype)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    answers = []
    for output in outputs:
        first = output.outputs[0]
        answers.append(Answer(first.text, tuple(first.token_ids), str(first.finish_reason) == "stop"))
    return answers


def with_transformers(model: Path, prompts: list[list[int]], max_tokens: int, dtype: str) -> list[Answer]:
    """Greedy answers through transformers, in batches of prompts of one length (no padding, so no doubt)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends = set(network.generation_config.eos_token_id)
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    answers: dict[int, Answer] = {}
    for length, indices in track(sorted(by_length.items()), description="transformers"):
        batch = torch.tensor([prompts[index] for index in indices])
        made = network.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=max_tokens, do_sample=False
        )
        for index, row in zip(indices, made[:, length:].tolist(), strict=True):
            stop = next((place for place, token in enumerate(row) if token in ends), None)
            ids = row if stop is None else row[: stop + 1]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            answers[index] = Answer(text, tuple(ids), stop is not None)
    return [answers[index] for index in range(len(prompts))]


BACKENDS = {"tokenmill": with_tokenmill, "transformers": with_transformers}


def score(groups: dict[str, list[Sample]], answers: list[Answer]) -> dict[str, tuple[int, int]]:
    """Right answers and all answers by skill; ``answers`` are in the order of the groups' samples."""
    rest = iter(answers)
    scores = {}
    for skill, samples in groups.items():
        right = sum(is_right(s, a.text, a.ended) for s, a in ((s, next(rest)) for s in samples))
        scores[skill] = (right, len(samples))
    return scores


def stories(groups: dict[str, list[Sample]], answers: list[Answer], count: int) -> list[tuple[str, str]]:
    """The first ``count`` story requests with the stories that the model told, right or wrong."""
    pairs = zip((s for samples in groups.values() for s in samples), answers, strict=True)
    told = [(s.messages[-2]["content"], a.text.strip()) for s, a in pairs if s.skill == "stories"]
    return told[:count]


def free_replies(encoder: Encoder, arguments: argparse.Namespace) -> list[FreeReply]:
    """The replies to the last turns of the free requests; earlier turns are answered by the model too."""
    chats: list[list[Message]] = [[] for _ in FREE]
    ended = [False] * len(FREE)
    for turn in range(max(len(free.turns) for free in FREE)):
        active = [index for index, free in enumerate(FREE) if turn < len(free.turns)]
        prompts = []
        for index in active:
            chats[index].append(user(FREE[index].turns[turn]))
            text = encoder.template.render(chats[index], list(FREE[index].tools), add_generation_prompt=True)
            prompts.append(encoder.tokenizer.encode(text).ids)
        answers = BACKENDS[arguments.backend](arguments.model, prompts, arguments.max_tokens, "bfloat16")
        for index, answer in zip(active, answers, strict=True):
            chats[index].append(assistant(answer.text))
            ended[index] = answer.ended
    texts = [chat[-1]["content"] for chat in chats]
    return [(free, text, is_good(free, text, end)) for free, text, end in zip(FREE, texts, ended, strict=True)]


def show(scores: dict[str, tuple[int, int]], title: str) -> None:
    """Print the table."""
    table = Table("skill", "right", "of", "accuracy", title=title)
    for skill, (right, total) in scores.items():
        table.add_row(skill, str(right), str(total), f"{100 * right / total:.1f}%")
    Console().print(table)


def first_difference(ours: list[Answer], theirs: list[Answer]) -> str | None:
    """Say where the greedy tokens of two backends differ first; return None if they never do."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for place, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
            if x != y:
                return f"prompt {index}, token {place}: {x} and {y}"
    return None


def main() -> int:
    """Evaluate and print; the exit status is 1 if backends were compared and differ."""
    parser = argparse.ArgumentParser(description="Held-out greedy accuracy by skill")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--backend", choices=BACKENDS, default="tokenmill")
    parser.add_argument("--samples", type=int, default=200, help="held-out samples per skill")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--max-tokens", type=int, default=260)
    parser.add_argument("--show-wrong", type=int, default=0, help="print so many wrong answers per skill")
    parser.add_argument("--stories", type=int, default=0, metavar="N", help="also print N stories")
    parser.add_argument("--free", action="store_true", help="also print the replies to requests in free words")
    parser.add_argument("--card", action="store_true", help="write the table into the model's README.md")
    parser.add_argument("--json", type=Path, help="also write the scores here")
    parser.add_argument(
        "--same-as-transformers", type=int, default=0, metavar="N", help="compare N prompts, in float32"
    )
    arguments = parser.parse_args()
    encoder = Encoder(arguments.model)
    groups = heldout(arguments.samples, arguments.seed)
    samples = [sample for group in groups.values() for sample in group]
    prompts = [encoder.tokenizer.encode(encoder.text(sample, prompt_only=True)).ids for sample in samples]
    if arguments.same_as_transformers:
        chosen = random.Random(arguments.seed).sample(prompts, k=min(arguments.same_as_transformers, len(prompts)))
        both = [backend(arguments.model, chosen, arguments.max_tokens, "float32") for backend in BACKENDS.values()]
        difference = first_difference(both[0], both[1])
        print(f"{len(chosen)} prompts: " + (difference or "both backends give the same greedy tokens"))
        return int(difference is not None)
    answers = BACKENDS[arguments.backend](arguments.model, prompts, arguments.max_tokens, "bfloat16")
    scores = score(groups, answers)
    show(scores, f"{arguments.model.name}, greedy, held-out, through {arguments.backend}")
    if arguments.show_wrong:
        _show_wrong(groups, answers, arguments.show_wrong)
    replies = free_replies(encoder, arguments) if arguments.free or arguments.card else []
    if arguments.card:
        write_card(arguments.model / "README.md", scores, stories(groups, answers, 10), replies)
    if arguments.free:
        print("\n".join(free_lines(replies)))
        print(f"{sum(good for _, _, good in replies)} of {len(replies)} free requests got a good reply")
    for question, story in stories(groups, answers, arguments.stories):
        print(f"\n> {question}\n{story}")
    if arguments.json:
        arguments.json.write_text(json.dumps(scores, indent=2) + "\n")
    return 0


def _show_wrong(groups: dict[str, list[Sample]], answers: list[Answer], count: int) -> None:
    rest = iter(answers)
    for skill, samples in groups.items():
        wrong = [(s, a) for s, a in ((s, next(rest)) for s in samples) if not is_right(s, a.text, a.ended)]
        for sample, answer in wrong[:count]:
            print(f"{skill}: {sample.messages[-2]['content']!r}\n   {answer.text!r}")
            print(f"   {sample.messages[-1].get('tool_calls') or sample.messages[-1]['content']!r}")


if __name__ == "__main__":
    sys.exit(main())
