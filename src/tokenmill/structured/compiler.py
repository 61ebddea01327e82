"""Grammar text to a matcher, for one tokenizer, through llguidance.

llguidance's own limits bound what a mask may cost at each token; what compiling costs is bounded by `sandbox`, where
the same compiler runs first in a process that can be killed.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidRequest

# About 10 ms for a mask at most, and 8 MiB of lexer states for a request, by llguidance's own figures.
# Sets of tokens that llguidance takes into a mask at once where a grammar allows any of them. Its own sets and that of
# short pieces of strings, which schemas with lengths allow where they do not allow longer ones: 9 us a mask for 12.
_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(_STRING + count for count in ("{1,4}", "{1,10}", "{1,30}", "+"))]
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 8_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_MAX_ERROR_CHARACTERS = 300
_NUM_FIRST_STEPS = 3
_NAME = re.compile(r'"name": "((?:JSON|regular|Lark|GBNF)_[a-z]+)\d')


class GrammarTokenizer(msgspec.Struct, frozen=True):
    """What a grammar must know of the tokenizer.

    Attributes:
        path: its tokenizer.json.
        vocab_size: the model's; masks have that many bits.
        eos_token_ids: allowed where the grammar is complete.
    """

    path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarCompiler:
    """Compiles grammars. Loads the tokenizer when the first one comes, which takes a second for a large one."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer

    def load(self) -> None:
        """Load the tokenizer now.

        Raises:
            InvalidRequest: the tokenizer is of a kind that outputs cannot be constrained with.
        """
        _ = self._backend

    def compile(self, text: str) -> Any:
        """A matcher at its start, of which requests take deep copies; its first masks could be computed.

        Raises:
            InvalidRequest: not a grammar, one that is too large, or one that nothing matches.
        """
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._backend, text, log_level=0, limits=limits)
        probe = matcher if matcher.is_error() else _first_steps(matcher.deep_copy())
        if probe.is_error():
            raise InvalidRequest(f"the {_written_in(text)} cannot be used: {explain(probe)}")
        return matcher

    @functools.cached_property
    def _backend(self) -> Any:
        import llguidance

        try:
            raw = Path(self._tokenizer.path).read_text(encoding="utf-8")
            ids = list(self._tokenizer.eos_token_ids)
            size = self._tokenizer.vocab_size
            return llguidance.LLTokenizer(raw, n_vocab=size, eos_token=ids or None, slices=_SLICES)
        except (ValueError, FileNotFoundError) as error:  # any other OSError may pass
            raise InvalidRequest("structured output is not possible with this model's tokenizer") from error


def _written_in(text: str) -> str:
    """What the client's part of a grammar was written in, by the name that `GrammarBuilder` gave it."""
    name = _NAME.search(text)
    return "grammar" if name is None else name[1].replace("_", " ")


def _first_steps(matcher: Any) -> Any:
    """Go a little way with the lowest token that is allowed: most of what is too complex shows at once."""
    for _ in range(_NUM_FIRST_STEPS):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error() or matcher.is_stopped():
            break
        matcher.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
    return matcher


def explain(matcher: Any) -> str:
    """Why a matcher gave up, on one line and without its inner state."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    if error.startswith("NoExtension"):
        return "nothing matches it"
    line = " ".join(error.split())
    return line if len(line) <= _MAX_ERROR_CHARACTERS else line[:_MAX_ERROR_CHARACTERS] + " ..."
