"""No call is malformed: calls of all notations under `tool_choice: "auto"`, drawn at random, are counted.

    python -m tests.model.structured.tool_calls [--calls 10000] [--seed 0] [--notations gemma4]

Three models at temperature 2: random weights with the marks of calls as tokens, random weights that spell each mark in
two tokens, and the demo. That they open calls, and end their texts, is made likely by `logit_bias` alone; what a call
says is chance. Tools with schemas drawn anew (strict, not, and `strict: false`), several answers of one prompt,
thinking, `response_format` beside tools, speculation, preemptions, limits that cut; the text worker gets the tokens in
deltas of any size. Every call that no limit cut is read as JSON and held against its schema by the package jsonschema,
and no opening may be left over in text that shows special tokens. One line of JSON last; an error where a call is at
fault.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import jsonschema
from tqdm import tqdm

from tests.checkpoints import make_checkpoint
from tests.model.structured.lazy_vocabulary import MARKS, NUM_GAPS, vocabulary
from tests.model.structured.schemas import FORMATS, random_tools
from tests.seeding import root_seed
from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import eos_token_ids
from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.messages import (
    AddRequest,
    CallRules,
    GenerateText,
    RequestRejected,
    StepOutputs,
    TextOutputs,
    TokenOutput,
)
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.demo import demo_model_path
from tokenmill.engine.loop.engine import Engine
from tokenmill.serving.frontend.json_schema import closed
from tokenmill.serving.frontend.processor_loading import load_text_processor
from tokenmill.serving.frontend.text_processor import TextProcessor
from tokenmill.serving.frontend.tool_parsers import harmony
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS
from tokenmill.startup.assembly.setup import build_engine

# By notation, the texts that open a call; what stands first is left over in the text where a call is not read.
OPENINGS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>",),
    "llama3_json": ("{",),
    "mistral": ("[TOOL_CALLS]",),
    "pythonic": ("[x(",),
    "lfm2": ("<|tool_call_start|>",),
    "granite": ("<|tool_call|>", "<tool_call>"),
    "phi4_mini_json": ("<|tool_call|>", "functools"),
    "gemma4": ("<|tool_call>",),
    harmony.NOTATION_NAME: ("<|start|>", "Ġto=functions."),
}
_UNMARKED = ("llama3_json", "pythonic", harmony.NOTATION_NAME)
_CLOSERS = (
    '"',
    "}",
    "]",
    '"}',
    "\n",
    "</tool_call>",
    ")",
    "</",
    "parameter",
    "function",
    ">",
    "{}",
    "<tool_call|>",
    '<|"|>',
)
_OPENING_SHARE, _CLOSING_SHARE, _END_SHARE, _TEMPERATURE = 0.35, 0.4, 0.05, 2.0
_PROMPT = "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\n"
_ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
_NUM_TOGETHER = 20


@dataclass(slots=True)
class Asked:
    """One prompt and the pieces of its answers so far.

    Attributes:
        shows_special: its text has special tokens. is_parallel: further calls are not dropped. has_form: where it is no
            call it is JSON, in whose strings marks are text.
    """

    notation: str
    tools: list[dict[str, Any]]
    shows_special: bool
    is_parallel: bool
    has_form: bool = False
    pieces: dict[str, list[AnswerPiece]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """The calls so far. A call that is at fault is kept whole."""

    calls: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    not_json: list[Any] = field(default_factory=list)
    not_valid: list[Any] = field(default_factory=list)
    not_read: list[Any] = field(default_factory=list)
    failed: list[Any] = field(default_factory=list)


class Bench:
    """One model with its text worker, and a number of prompts at once."""

    def __init__(self, folder: Path, rng: random.Random, counts: Counts, speculates: bool) -> None:
        self._rng, self._counts = rng, counts
        method = {"speculative_config": json.dumps({"method": "ngram"})} if speculates else {}
        sizes: dict[str, Any] = {"page_size": 16, "num_pages": 900, "max_num_seqs": 48, "max_model_len": 1024}
        config = EngineConfig(model=str(folder), dtype="bfloat16", num_threads=1, **sizes, **method).resolve()
        self._engine: Engine = build_engine(config).engine
        self._text: TextProcessor = load_text_processor(folder, config)
        self._vocab_size = self._text.tokenizer.vocab_size
        self._eos = min(eos_token_ids(folder))
        self._numbers = count()
        self._asked: dict[str, Asked] = {}
        self._held: dict[str, list[TokenOutput]] = {}

    def close(self) -> None:
        self._engine.close()

    def step(self, notations: list[str]) -> None:
        """Fill up with prompts, run one step, and hand the text worker what it may have."""
        notations = [name for name in notations if self.opens(name)]
        while notations and len({id(one) for one in self._asked.values()}) < _NUM_TOGETHER:
            self._ask(self._rng.choice(notations))
        if self._rng.random() < 0.005:
            self._engine.reset_prefix_cache(preempt_running=True)
        ready: list[TokenOutput] = []
        for output in self._engine.step():
            held = self._held.setdefault(output.id, [])
            held.append(output)
            if output.finish_reason is not None or self._rng.random() < 0.4:
                ready.append(_joined(self._held.pop(output.id)))
        if ready:
            self._read(ready)

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    def _ask(self, notation: str) -> None:
        rng, is_harmony = self._rng, notation == harmony.NOTATION_NAME
        tools = random_tools(rng, notation)
        names = [tool["function"]["name"] for tool in tools]
        extras: list[dict[str, Any]] = [{}, {}, {"top_p": 0.95}, {"top_k": 200}, {"logprobs": 1}, {"min_tokens": 10}]
        outputs = StructuredOutputs(json=_ANSWER) if rng.random() < 0.1 else None
        shows, is_parallel = rng.random() < 0.5, rng.random() < 0.8
        message = GenerateText(
            ids=[str(next(self._numbers)) for _ in range(rng.choice([1, 2, 4]))],
            text=_PROMPT,
            tools=tools,
            calls=CallRules(notation, names, False, is_parallel=is_parallel, is_lazy=True),
            reasoning=harmony.STYLE_NAME if is_harmony else rng.choice(["", "", "qwen3"]),
            params=SamplingParams(
                temperature=_TEMPERATURE,
                max_tokens=rng.randint(60, 500),
                skip_special_tokens=not shows,
                seed=rng.randrange(2**63),
                logit_bias=self._bias(notation),
                structured_outputs=outputs,
                **rng.choice(extras),
            ),
        )
        shows_special = shows or NOTATIONS[notation].needs_special_tokens
        asked = Asked(notation, tools, shows_special, is_parallel, outputs is not None)
        routed = self._text.process(message)
        for refusal in routed.to_api:
            assert isinstance(refusal, RequestRejected), refusal
            assert refusal.status == 400, refusal
            self._counts.refusals[f"{notation}: {refusal.error.split(':')[0]}"] += 1
        for request in routed.to_engine:
            assert isinstance(request, AddRequest), "a prompt without images is only added"
            self._asked[request.id] = asked
            asked.pieces[request.id] = []
            self._engine.add(request)

    def opens(self, notation: str) -> bool:
        """Return True if chance can open a call of a notation: by one token, or two."""
        return bool(self._opening(notation))

    def _opening(self, notation: str) -> set[int]:
        """Return the tokens that open a call."""
        token_id = self._text.tokenizer.token_id
        opening: set[int] = set()
        for text in OPENINGS[notation]:
            found = [token_id(one) for one in ((text,) if token_id(text) is not None else _halves(text))]
            opening.update(one for one in found if one is not None and None not in found)
        return opening

    def _bias(self, notation: str) -> dict[int, float]:
        """Return what lifts the tokens of openings and of ends to their share of the chances, were logits equal."""
        tokenizer, opening = self._text.tokenizer, self._opening(notation)
        closing = {token for text in _CLOSERS for token in tokenizer.encode(text, add_special_tokens=False)[:1]}
        closing |= {token for mark in MARKS if (token := tokenizer.token_id(mark)) is not None and "/" in mark}
        closing -= opening
        shares = dict.fromkeys(closing, _CLOSING_SHARE / len(closing)) | {self._eos: _END_SHARE}
        shares |= dict.fromkeys(opening, _OPENING_SHARE / len(opening))
        return {token: _TEMPERATURE * math.log(share * self._vocab_size) for token, share in shares.items()}

    def _read(self, outputs: list[TokenOutput]) -> None:
        routed = self._text.process(StepOutputs(0, outputs))
        for message in routed.to_api:
            for output in message.outputs if isinstance(message, TextOutputs) else ():
                asked = self._asked[output.id]
                asked.pieces[output.id] += output.answer or ()
                if output.finish_reason is not None:
                    del self._asked[output.id]
                    self._check(asked, asked.pieces.pop(output.id), output.finish_reason, output.error)
            if isinstance(message, RequestRejected):
                for request_id in message.ids:
                    asked = self._asked.pop(request_id)
                    self._counts.refusals[f"{asked.notation}: {message.error[:200]}"] += 1

    def _check(self, asked: Asked, pieces: list[AnswerPiece], reason: FinishReason, error: str | None) -> None:
        counts = self._counts
        counts.answers[asked.notation] += 1
        if reason is FinishReason.ERROR:
            counts.failed.append((asked.notation, error, asked.tools))
            return
        calls, is_last_call = list[list[str]](), bool(pieces) and pieces[-1].kind is PieceKind.CALL
        for piece in pieces:
            if piece.kind is PieceKind.CALL and piece.name is not None:
                calls.append([piece.name, ""])
            if piece.kind is PieceKind.CALL:
                calls[-1][1] += piece.text
        if is_last_call and reason is FinishReason.LENGTH:
            calls.pop()  # the limit may have cut it, and its reply says so
        for name, arguments in calls:
            check_call(counts, asked, name, arguments)
        # Text before a call and text behind it are no mark together; a dropped call leaves nothing between them.
        shown = pieces if asked.is_parallel else takewhile(lambda piece: piece.kind is not PieceKind.CALL, pieces)
        text = "".join(piece.text if piece.kind is PieceKind.TEXT else "\0" for piece in shown)
        if (
            asked.shows_special
            and asked.notation not in _UNMARKED
            and not (asked.has_form and text.lstrip("\0 \n\r\t").startswith("{"))
            and any(mark in text for mark in OPENINGS[asked.notation])
        ):
            counts.not_read.append((asked.notation, text, asked.tools))


def check_call(counts: Counts, asked: Asked, name: str, arguments: str) -> None:
    """Count one call."""
    functions = {tool["function"]["name"]: tool["function"] for tool in asked.tools}
    counts.calls[asked.notation] += 1
    fault = (asked.notation, name, arguments, functions.get(name))
    try:
        value = json.loads(arguments)
    except ValueError:
        counts.not_json.append(fault)
        return
    if name not in functions or not isinstance(value, dict):
        counts.not_valid.append(fault)
        return
    strict = functions[name].get("strict")
    if strict is False and NOTATIONS[asked.notation].writes_objects:
        return
    schema = closed({"type": "object", **functions[name]["parameters"]}, strict is True)
    try:
        jsonschema.validate(value, schema, format_checker=FORMATS)
    except jsonschema.ValidationError as error:
        counts.not_valid.append((*fault, error.message))


def _joined(outputs: list[TokenOutput]) -> TokenOutput:
    whole = outputs[-1]
    whole.token_ids = [token_id for output in outputs for token_id in output.token_ids]
    if whole.logprobs is not None:
        whole.logprobs = [one for output in outputs for one in output.logprobs or ()]
    return whole


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


@contextmanager
def benches(folder: Path, rng: random.Random, counts: Counts) -> Iterator[list[Bench]]:
    """Run the three models."""
    halves = sorted({half for mark in (*MARKS, "functools") for half in _halves(mark)})
    whole = ("[x(", *(one for one in OPENINGS[harmony.NOTATION_NAME] if one not in MARKS))
    made: list[Bench] = []
    try:
        for name, marks, pieces in (("marks", MARKS, whole), ("halves", (), [*halves, "[x("])):
            (folder / name).mkdir()
            words = vocabulary(folder / name, marks, pieces)
            # Ids that no token has are nothing in the text, so one could interrupt a mark.
            fields = {"vocab_size": words.size - NUM_GAPS, "eos_token_id": words.eos, "max_position_embeddings": 1024}
            make_checkpoint(folder / name, seed=rng.randrange(1 << 30), tokenizer=False, **fields)
            made.append(Bench(folder / name, rng, counts, name == "halves"))
        made.append(Bench(demo_model_path(), rng, counts, True))
        yield made
    finally:
        for bench in made:
            bench.close()


def check(seed: int, num_calls: int, notations: Sequence[str] = tuple(OPENINGS)) -> Counts:
    """Draw calls until there are this many, with as many of each notation at least."""
    rng, counts = random.Random(seed), Counts()
    share, wanted = math.ceil(num_calls / len(notations)), [*notations]
    with (
        tempfile.TemporaryDirectory() as folder,
        benches(Path(folder), rng, counts) as made,
        tqdm(total=share * len(notations), unit="call", smoothing=0, mininterval=20) as bar,
    ):
        while wanted or any(bench.has_work for bench in made):
            wanted = [name for name in notations if counts.calls[name] < share]
            before = counts.calls.total()
            for bench in made:
                bench.step(wanted)
            bar.update(counts.calls.total() - before)
    return counts


def main() -> int:
    """Draw, count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=root_seed())
    parser.add_argument("--notations", nargs="+", choices=OPENINGS, default=[*OPENINGS])
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    started = time.monotonic()
    counts = check(options.seed, options.calls, options.notations)
    faults = {name: getattr(counts, name) for name in ("not_json", "not_valid", "not_read", "failed")}
    for name, cases in faults.items():
        for case in cases[:5]:
            print(name, case, file=sys.stderr)
    seconds = round(time.monotonic() - started)
    shown = {name: dict(getattr(counts, name)) for name in ("calls", "answers", "refusals")}
    totals = {name: len(cases) for name, cases in faults.items()}
    print(json.dumps({"seed": options.seed, "seconds": seconds, "total": counts.calls.total(), **shown, **totals}))
    return int(any(totals.values()))


if __name__ == "__main__":
    sys.exit(main())
