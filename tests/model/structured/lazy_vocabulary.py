"""The demo model's vocabulary with the marks of all notations as tokens, and a few ids that no token has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config.model_files import eos_token_ids
from tokenmill.demo import demo_model_path
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.serving.frontend.tokenizer import Tokenizer

_SQUARE = ("TOOL_CALLS", "ARGS", "CALL_ID")
_BARRED = ("tool_call", "/tool_call", "tool_call_start", "tool_call_end", "python_tag")
_HARMONY = ("channel", "message", "start", "end", "call", "return", "constrain")
_GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
MARKS = (*(f"[{one}]" for one in _SQUARE), *(f"<|{one}|>" for one in (*_BARRED, *_HARMONY)), *_GEMMA)
NUM_GAPS = 5


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as a grammar builder sees it, and its compiler."""

    tokenizer: Tokenizer
    size: int
    eos: int
    compiler: GrammarCompiler

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_id(token)

    def ids_outside_text(self) -> Sequence[int]:
        return self.tokenizer.ids_outside_text(self.size)


def vocabulary(folder: Path, marks: Sequence[str], halves: Sequence[str] = ()) -> Vocabulary:
    """Write the tokenizer with these tokens added to `folder`, and load it; `halves`: text that no other is made of."""
    source = demo_model_path()
    file = json.loads((source / "tokenizer.json").read_text())
    words = file["model"]["vocab"]
    words |= {half: len(words) + at for at, half in enumerate(halves)}
    for token in file["added_tokens"]:
        token["id"] += len(halves)
    first = max(token["id"] for token in file["added_tokens"]) + 1
    fixed = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    file["added_tokens"] += [{"id": first + at, "content": mark, **fixed} for at, mark in enumerate(marks)]
    (folder / "tokenizer.json").write_text(json.dumps(file))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    eos = min(eos_token_ids(source)) + len(halves)
    size = first + len(marks) + NUM_GAPS
    compiler = GrammarCompiler(GrammarTokenizer(str(folder / "tokenizer.json"), size, (eos,)))
    return Vocabulary(Tokenizer.load(folder), size, eos, compiler)
