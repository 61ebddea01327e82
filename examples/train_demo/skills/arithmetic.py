"""Adding, subtracting and comparing numbers of up to three digits, answered plainly or after thinking.

Both spell out column arithmetic, ones first: the plain answer in one line, the thought with every carry that a column
takes in and gives out. A small model learns that exactly, where it would learn bare sums only roughly.
"""

from __future__ import annotations

import random

from .base import Message, Sample, Split, assistant, casual, split_of, user
from .words import NAMES, NOUNS

PLACES = ("ones", "tens", "hundreds")
ADD = ("{a} + {b}", "{a}+{b}", "{a} plus {b}", "the sum of {a} and {b}")
SUBTRACT = ("{a} - {b}", "{a}-{b}", "{a} minus {b}")
ASK = (
    "{e}?",
    "{e} =",
    "What is {e}?",
    "Compute {e}.",
    "Calculate {e}.",
    "How much is {e}?",
    "{e}",
    "Solve {e}.",
    "Can you work out {e}?",
    "What's {e}?",
    "Tell me {e}.",
    "What does {e} equal?",
    "{e} = ?",
    "Please calculate {e}.",
    "Can you calculate {e}?",
    "Do you know what {e} is?",
    "I need {e}.",
    "And {e}?",
)
ADD_DIRECT = ("Add {a} and {b}.", "Add {b} to {a}.", "What do you get when you add {a} and {b}?")
SUBTRACT_DIRECT = ("Subtract {b} from {a}.", "Take {b} away from {a}.", "What is left when you take {b} from {a}?")
THINK = (
    "Think first: {q}",
    "{q} Think step by step.",
    "{q} Think before you answer.",
    "Show your thinking. {q}",
    "Please think about it: {q}",
    "{q} Work it out step by step.",
)


def column_thought(a: int, op: str, b: int) -> str:
    """The worked columns of ``a + b`` or ``a - b``."""
    lines = [f"{a} {op} {b}"]
    negative = op == "-" and a < b
    if negative:
        lines.append(f"{a} is less than {b}, so {b} - {a} with a minus")
        a, b = b, a
    carry, width = 0, max(len(str(a)), len(str(b)))
    for x, y in zip(reversed(str(a).zfill(width)), reversed(str(b).zfill(width)), strict=True):
        column = int(x) + int(y) + carry if op == "+" else int(x) - int(y) - carry
        step = f"{x} {op} {y} {op} {carry} = "
        if op == "-" and column < 0:
            step = f"1{step}"
        carry = int(column > 9 or column < 0)
        lines.append(f"{step}{column if op == '+' else column % 10}, write {column % 10}, carry {carry}")
    if op == "+" and carry:
        lines.append("write 1")
    lines.append(f"so {'-' if negative else ''}{a + b if op == '+' else a - b}")
    return "\n".join(lines)


def worked(a: int, op: str, b: int) -> str:
    """The plain answer: the columns in one line and the result; single digits are answered at once."""
    result = f"{a} {op} {b} = {a + b if op == '+' else a - b}"
    if a < 10 and b < 10:
        return result
    parts, opening = [], ""
    x, y = a, b
    if op == "-" and a < b:
        opening, x, y = f"{a} is less than {b}, so turn it around. ", b, a
    carry, width = 0, max(len(str(x)), len(str(y)))
    columns = zip(PLACES, reversed(str(x).zfill(width)), reversed(str(y).zfill(width)), strict=False)
    for place, left, right in columns:
        top = int(left)
        value = top + int(right) + carry if op == "+" else top - int(right) - carry
        if value < 0:
            top, value = top + 10, value + 10
        parts.append(f"{place} {top} {op} {right} {op} {carry} = {value}")
        carry = int(top > 9 if op == "-" else value > 9)
    text = ", ".join(parts)
    return f"{opening}{text[0].upper()}{text[1:]}. So {result}"


def draw_pair(rng: random.Random, split: Split) -> tuple[int, str, int]:
    """A problem of the split. Sums of numbers below 20 are facts to know, so they are always in training."""
    while True:
        op = rng.choice("+-")
        lengths = rng.choices((1, 2, 3), (2, 3, 6), k=2)
        a, b = (rng.randint(0 if n == 1 else 10 ** (n - 1), 10**n - 1) for n in lengths)
        if rng.random() < 0.1:  # close to each other, where which is less takes a second look
            b = min(999, max(0, a + rng.randint(-30, 30)))
        if op == "-" and a < b and rng.random() < 0.6:
            a, b = b, a
        part = "train" if a < 20 and b < 20 else split_of(f"arithmetic:{a}{op}{b}")
        if part == split:
            return a, op, b


def _question(rng: random.Random, a: int, op: str, b: int) -> str:
    if rng.random() < 0.2:
        return casual(rng, rng.choice(ADD_DIRECT if op == "+" else SUBTRACT_DIRECT).format(a=a, b=b))
    if rng.random() < 0.12 and (op == "+" or a >= b):
        return _story(rng, a, op, b)
    expression = rng.choice(ADD if op == "+" else SUBTRACT).format(a=a, b=b)
    question = rng.choice(ASK).format(e=expression)
    return casual(rng, question[0].upper() + question[1:])


def _story(rng: random.Random, a: int, op: str, b: int) -> str:
    name, noun = rng.choice(NAMES), rng.choice(NOUNS)
    verb = rng.choice(("gets", "finds", "buys") if op == "+" else ("loses", "gives away", "sells"))
    tail = f"{b} more" if op == "+" else str(b)
    ask = rng.choice(("How many are there now?", f"How many does {name} have now?"))
    return f"{name} has {a} {noun}s and {verb} {tail}. {ask}"


def _turn(rng: random.Random, pair: tuple[int, str, int]) -> list[Message]:
    a, op, b = pair
    return [user(_question(rng, a, op, b)), assistant(worked(a, op, b))]


def plain(rng: random.Random, split: Split) -> Sample:
    """One to three problems in a row, each worked in one line."""
    pairs = [draw_pair(rng, split) for _ in range(rng.choice((1, 1, 1, 2, 3) if split == "train" else (1,)))]
    messages = [message for pair in pairs for message in _turn(rng, pair)]
    a, op, b = pairs[-1]
    return Sample("arithmetic", f"arithmetic:{a}{op}{b}", tuple(messages))


def thinking(rng: random.Random, split: Split) -> Sample:
    """One problem, thought through because the user or the request's settings asked for it."""
    a, op, b = draw_pair(rng, split)
    question, switch = _question(rng, a, op, b), rng.random() < 0.5
    if not switch:
        question = rng.choice(THINK).format(q=question)
    answer = assistant(f"{a} {op} {b} = {a + b if op == '+' else a - b}", column_thought(a, op, b))
    return Sample("arithmetic (thinking)", f"arithmetic:{a}{op}{b}", (user(question), answer), (), switch or None)


LARGER = (
    "Which is larger, {a} or {b}?",
    "Which number is bigger: {a} or {b}?",
    "What is greater, {a} or {b}?",
    "Pick the larger of {a} and {b}.",
    "What is bigger, {a} or {b}?",
    "Which one is larger: {a} or {b}?",
    "Is {a} or {b} larger?",
)
SMALLER = ("Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?", "Pick the smaller of {a} and {b}.")
YES_NO = ("Is {a} {word} than {b}?", "Tell me, is {a} {word} than {b}?", "Would you say {a} is {word} than {b}?")


def compare(rng: random.Random, split: Split) -> Sample:
    """Ask which of two numbers is larger or smaller, or whether one is more than the other."""
    while True:
        first = rng.randint(1, 3)
        second = first if rng.random() < 0.4 else rng.randint(1, 3)
        a, b = rng.randint(0, 10**first - 1), rng.randint(0, 10**second - 1)
        if a != b and split_of(f"compare:{min(a, b)}:{max(a, b)}") == split:
            break
    form = rng.randrange(3)
    if form == 0:
        question, answer = rng.choice(LARGER), f"{max(a, b)} is larger than {min(a, b)}."
    elif form == 1:
        question, answer = rng.choice(SMALLER), f"{min(a, b)} is smaller than {max(a, b)}."
    else:
        more = rng.random() < 0.5
        word = rng.choice(("larger", "greater", "bigger") if more else ("smaller", "less"))
        question = rng.choice(YES_NO).replace("{word}", word)
        answer = f"{'Yes' if (a > b) == more else 'No'}, {a} is {'larger' if a > b else 'smaller'} than {b}."
    text = casual(rng, question.format(a=a, b=b))
    return Sample("comparing", f"compare:{min(a, b)}:{max(a, b)}", (user(text), assistant(answer)))
