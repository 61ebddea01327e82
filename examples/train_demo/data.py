"""From samples to padded batches: rendering by the chat template, loss masks, length-sorted batching.

There is one source of truth for the text: the chat template that ships with the model. The loss falls on what the
assistant says (up to and with ``<|im_end|>``), never on what is said to it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
from skills import SKILLS, Message, Sample, Split
from skills.recall import many_recalls, recall
from tokenizers import Tokenizer

SYSTEMS = (
    "You are a helpful assistant.",
    "You are helpful.",
    "You are the TokenMill demo model.",
    "Be brief.",
    "You are a small model served by TokenMill.",
    "Answer the user's questions.",
    "You are a friendly assistant.",
    "Answer shortly and correctly.",
    "You help people who use TokenMill.",
    "Be polite and exact.",
    "You are an AI assistant.",
    "You are a helpful assistant. Answer in one or two sentences.",
    "Follow the user's instructions.",
    "You are an assistant that is good with numbers and lists.",
)
CHARACTERS_PER_TOKEN = 3  # of a rendered chat, a little less than it has: rows over the length are dropped
THOUGHT = "This needs no working out."
CHATTY = ("copy", "reverse", "count", "sort", "arithmetic", "compare", "json", "faq", "about", "scope", "recall")


class Template:
    """The chat template, compiled once; renders exactly what transformers' ``apply_chat_template`` renders."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(source)

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **flags: Any) -> str:
        """The text of a conversation; ``flags`` are ``add_generation_prompt`` and ``enable_thinking``."""
        return self._template.render(messages=messages, tools=tools, **flags)


@dataclass(frozen=True)
class Row:
    """One encoded conversation: ``ids`` and the loss mask ``mask``, both of its length."""

    sample: Sample
    ids: np.ndarray
    mask: np.ndarray


class Encoder:
    """Turns samples into rows with the tokenizer and template of a model folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        self.template = Template(config["chat_template"])
        self.pad = self._id("<|endoftext|>")
        self.start, self.end, self.think = (self._id(t) for t in ("<|im_start|>", "<|im_end|>", "<think>"))
        self.assistant = self.tokenizer.encode("assistant").ids

    def _id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return found

    def text(self, sample: Sample, prompt_only: bool = False) -> str:
        """The rendered conversation, or its prompt without the expected answer."""
        flags: dict[str, Any] = {} if sample.thinking is None else {"enable_thinking": sample.thinking}
        messages = list(sample.messages[:-1] if prompt_only else sample.messages)
        return self.template.render(messages, list(sample.tools), add_generation_prompt=prompt_only, **flags)

    def rows(self, samples: list[Sample]) -> list[Row]:
        """Encode many samples at once."""
        encodings = self.tokenizer.encode_batch_fast([self.text(sample) for sample in samples])
        rows = []
        for sample, encoding in zip(samples, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int64)
            rows.append(Row(sample, ids, self._mask(sample, ids)))
        return rows

    def _mask(self, sample: Sample, ids: np.ndarray) -> np.ndarray:
        mask = np.zeros(len(ids), dtype=bool)
        spans = []
        ends = np.flatnonzero(ids == self.end)
        head = len(self.assistant)
        for start in np.flatnonzero(ids == self.start):
            if ids[start + 1 : start + 1 + head].tolist() == self.assistant:
                spans.append((start + head + 2, ends[np.searchsorted(ends, start)] + 1))
        for begin, end in spans[-1:] if sample.last_only else spans:
            mask[begin:end] = True
        if sample.thinking is False:  # the template, not the model, writes the empty thought
            begin = spans[-1][0]
            mask[begin : begin + 4] = False
        return mask

    def answer_span(self, row: Row) -> tuple[int, int]:
        """First and last+1 position of the last assistant answer's loss tokens."""
        wanted = np.flatnonzero(row.mask)
        gaps = np.flatnonzero(np.diff(wanted) > 1)
        return int(wanted[gaps[-1] + 1] if len(gaps) else wanted[0]), int(wanted[-1]) + 1


@dataclass(frozen=True)
class Mix:
    """The sources of a training phase: skill weights, longest row, and the share of long mixed chats."""

    weights: dict[str, float]
    max_length: int = 384
    chat_share: float = 0.1


def _decorate(rng: random.Random, sample: Sample) -> Sample:
    """Sometimes add a system prompt or a thinking switch, as real requests have them."""
    if sample.messages[0]["role"] != "system" and rng.random() < 0.25:
        system = {"role": "system", "content": rng.choice(SYSTEMS)}
        sample = replace(sample, messages=(system, *sample.messages))
    draw = rng.random()
    if sample.thinking is None and "reasoning_content" not in sample.messages[-1] and sample.exact:
        if draw < 0.03:
            return replace(sample, thinking=False)
        simple = not sample.skill.startswith("arithmetic") and not sample.messages[-1].get("tool_calls")
        if draw < 0.05 and simple and sample.messages[-2]["role"] == "user":
            last = {**sample.messages[-1], "reasoning_content": THOUGHT}
            return replace(sample, thinking=True, last_only=True, messages=(*sample.messages[:-1], last))
    return sample


def filler(rng: random.Random, split: Split) -> list[Message]:
    """One exchange of any chatty skill without a system prompt."""
    while True:
        messages = SKILLS[rng.choice(CHATTY[:-1])](rng, split).messages
        if messages[0]["role"] == "user":
            return list(messages[:2])


def long_chat(rng: random.Random, split: Split, characters: int) -> Sample:
    """Many exchanges in one conversation of about ``characters`` characters; mostly with recalls around or in it."""
    draw = rng.random()
    if draw < 0.3:
        return recall(rng, split, filler, max(1, characters // 160))
    if draw < 0.8:
        return many_recalls(rng, split, filler, characters)
    messages: list[Message] = []
    while sum(len(m["content"]) + 30 for m in messages) < characters:
        messages += filler(rng, split)
    return Sample("long chat", f"long:{messages[-2]['content']}", tuple(messages))


def draw_samples(rng: random.Random, mix: Mix, count: int) -> list[Sample]:
    """``count`` training samples of a mix."""
    names, weights = list(mix.weights), list(mix.weights.values())
    samples = []
    for name in rng.choices(names, weights, k=count):
        if rng.random() < mix.chat_share:
            sample = long_chat(rng, "train", rng.randint(200, mix.max_length * CHARACTERS_PER_TOKEN))
        else:
            sample = SKILLS[name](rng, "train")
        samples.append(_decorate(rng, sample))
    return samples


Batch = tuple[np.ndarray, np.ndarray]


def pad_rows(rows: list[Row], pad: int, multiple: int = 16) -> Batch:
    """Right-padded ``ids`` and ``mask``, both ``[len(rows), time]``, time rounded up to ``multiple``."""
    time = -(-max(len(row.ids) for row in rows) // multiple) * multiple
    ids = np.full((len(rows), time), pad, dtype=np.int64)
    mask = np.zeros((len(rows), time), dtype=bool)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)], mask[index, : len(row.ids)] = row.ids, row.mask
    return ids, mask


def pool_batches(
    encoder: Encoder, mix: Mix, seed: str, batch_tokens: int, draw: Callable[..., list[Sample]] = draw_samples
) -> Iterator[Batch]:
    """The batches of one pool of samples: sorted by length, cut to ``batch_tokens``, in shuffled order."""
    rng = random.Random(seed)
    rows = [row for row in encoder.rows(draw(rng, mix, 1500)) if len(row.ids) <= mix.max_length]
    rows.sort(key=lambda row: (len(row.ids), rng.random()))
    batches, current = [], []
    for row in rows:
        longest = -(-len(row.ids) // 16) * 16
        if current and longest * (len(current) + 1) > batch_tokens:
            batches.append(current)
            current = []
        current.append(row)
    rng.shuffle(batches)
    for batch in batches:
        yield pad_rows(batch, encoder.pad)
