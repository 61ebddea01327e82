"""Grammar text to a matcher, for one tokenizer, through llguidance.

llguidance's own limits bound what a mask may cost at each token; what compiling costs is bounded by `sandbox`, where
the same compiler runs first in a process that can be killed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidRequest
from tokenmill.model.structured.mapped_tokens import mapped_tokens
from tokenmill.model.structured.openings import LazyTemplate, Openings
from tokenmill.model.structured.schema_parts import with_reachable_keys, without_unsupported

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
# Keywords that llguidance reads and cannot always go on with, and what marks a schema that may lose parts.
_COUNTED = ('"patternProperties"', '"minProperties"')
_LENIENT = '"lenient": true'
_MAX_ERROR_CHARACTERS = 300
# What llguidance calls what it cannot decide, and an option that requests do not have.
_ONE_OF = "oneOf constraints are not supported"
_NUM_FIRST_STEPS = 3
_NAME = re.compile(r"((?:JSON|regular|Lark|GBNF)_[a-z_]+)\d+")


class GrammarTokenizer(msgspec.Struct, frozen=True):
    """The facts of a tokenizer that a grammar needs.

    Attributes:
        path: its tokenizer.json.
        cache: the folder of mapped vocabularies; empty: a large vocabulary is read like any other.
        vocab_size: the model's; masks have that many bits.
        eos_token_ids: allowed where the grammar is complete.
    """

    path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    cache: str = ""


class GrammarCompiler:
    """Compiles grammars. Loads the tokenizer when the first one comes, which takes a second for a large one."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._openings: dict[tuple[str, ...], Openings] = {}

    def load(self) -> None:
        """Load the tokenizer now.

        Raises:
            InvalidRequest: the tokenizer is of a kind that outputs cannot be constrained with.
        """
        _ = self._backend

    def compile(self, text: str) -> Any:
        """Return a matcher at its start, of which requests take deep copies; its first masks could be computed.

        Raises:
            InvalidRequest: not a grammar, one that is too large, or one that nothing matches.
        """
        if any(keyword in text for keyword in _COUNTED):
            text = self._with_schemas(text, lambda one: with_reachable_keys(one, self._is_used_up, _is_lenient(one)))
        matcher = self._matcher(text)
        if matcher.is_error() and _LENIENT in text:
            matcher = self._matcher(self._with_schemas(text, _leniently))
        probe = matcher if matcher.is_error() else _first_steps(matcher.deep_copy())
        if probe.is_error():
            raise InvalidRequest(f"the {self._written_in(text)} cannot be used: {explain(probe)}")
        return matcher

    def template(self, text: str, marks: tuple[str, ...] | None) -> Any:
        """Return the same with the marks of its free text, where the grammar has them."""
        matcher = self.compile(text)
        if marks is None:
            return matcher
        if marks not in self._openings:
            self._openings[marks] = Openings(marks, self._text_of, self._tokenizer.vocab_size)
        copy = matcher.deep_copy()
        return LazyTemplate(matcher, self._openings[marks], copy.is_accepting() and self.is_free(copy))

    def is_free(self, matcher: Any) -> bool:
        """Return True if a matcher allows any token next."""
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return bool(np.unpackbits(bits, count=self._tokenizer.vocab_size, bitorder="little").all())

    def _text_of(self, token_id: int) -> bytes:
        return bytes(self._backend.decode_bytes([token_id]))

    def _matcher(self, text: str) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS)
        return llguidance.LLMatcher(self._backend, text, log_level=0, limits=limits)

    def _with_schemas(self, text: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
        """Return the grammar with its JSON schemas changed."""
        try:
            whole = json.loads(text)
            grammars = whole["grammars"]
            for grammar in grammars:
                if isinstance(grammar.get("json_schema"), dict):
                    grammar["json_schema"] = change(grammar["json_schema"])
        except InvalidRequest as error:
            raise InvalidRequest(f"the {self._written_in(text)} cannot be used: {error}") from error
        return json.dumps(whole, ensure_ascii=False)

    def _written_in(self, text: str) -> str:
        """Return the format of the part that fails, or else of the first, by the name that `GrammarBuilder` gave it."""
        parts = [part for part in json.loads(text)["grammars"] if _NAME.fullmatch(part.get("name", ""))]
        for part in parts:
            if self._matcher(json.dumps({"grammars": [part]})).is_error():
                parts.insert(0, part)
                break
        return _NAME.sub(r"\1", parts[0]["name"]).replace("_", " ") if parts else "grammar"

    def _is_used_up(self, pattern: str, names: list[str]) -> bool:
        """Return True if only these keys match a regular expression: after them, and a comma, nothing can follow."""
        one = {"const": 1}
        schema = {
            "type": "object",
            "properties": dict.fromkeys(names, one),
            "patternProperties": {pattern: one},
            "required": names,
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
        matcher = self._matcher(json.dumps({"grammars": [{"json_schema": schema}]}))
        begun = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}:1," for name in names)
        if matcher.is_error() or not matcher.consume_tokens(self._backend.tokenize_str(begun)):
            return False
        return not np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8).any() or matcher.is_error()

    @functools.cached_property
    def _backend(self) -> Any:
        try:
            return self._mapped() or self._read()
        except (ValueError, FileNotFoundError) as error:  # any other OSError may pass
            raise InvalidRequest("structured output is not possible with this model's tokenizer") from error

    def _mapped(self) -> Any:
        """Return llguidance's tokenizer over a mapped vocabulary; None: there is none of it."""
        import llguidance

        own, ids = self._tokenizer, [*self._tokenizer.eos_token_ids]
        if not own.cache or not ids:
            return None
        tokens = mapped_tokens(Path(own.path), Path(own.cache), own.vocab_size, ids[0])
        if tokens is None:
            return None
        wrapper = llguidance.TokenizerWrapper(tokens)
        return llguidance.LLTokenizer(wrapper, n_vocab=own.vocab_size, eos_token=ids, slices=_SLICES)

    def _read(self) -> Any:
        """Return llguidance's own reading of a tokenizer.json."""
        import llguidance

        own, ids = self._tokenizer, [*self._tokenizer.eos_token_ids]
        raw = _cut_to(Path(own.path).read_text(encoding="utf-8"), own.vocab_size)
        return llguidance.LLTokenizer(raw, n_vocab=own.vocab_size, eos_token=ids or None, slices=_SLICES)


def _cut_to(raw: str, vocab_size: int) -> str:
    """Return a tokenizer.json without tokens that the model has no logits for: some may have been added to it."""
    file = msgspec.json.decode(raw)
    model: dict[str, Any] = file.get("model") or {}
    added: list[dict[str, Any]] = file.get("added_tokens") or []
    vocabulary: Any = model.get("vocab") or {}
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    if max([*ids, *(token["id"] for token in added)], default=0) < vocab_size:
        return raw
    file["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    if isinstance(vocabulary, list):
        model["vocab"] = vocabulary[:vocab_size]
    else:
        model["vocab"] = kept = {token: token_id for token, token_id in vocabulary.items() if token_id < vocab_size}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
        if merges:
            model["merges"] = [pair for pair in merges if {*pair, "".join(pair)} <= kept.keys()]
    return json.dumps(file, ensure_ascii=False)


def _is_lenient(schema: dict[str, Any]) -> bool:
    return bool((schema.get("x-guidance") or {}).get("lenient"))


def _leniently(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a lenient schema without what is not supported; any other as it is."""
    import llguidance

    guidance = schema.get("x-guidance") or {}
    if not _is_lenient(schema):
        return schema

    def is_usable(part: dict[str, Any]) -> bool:
        grammar = json.dumps({"grammars": [{"json_schema": {**part, "x-guidance": guidance}}]})
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None)
        return not is_error or any(message.startswith("Unsatisfiable schema") for message in messages)

    return without_unsupported(schema, is_usable)


def _first_steps(matcher: Any) -> Any:
    """Go a few steps with the lowest allowed token: most of what is too complex shows at once."""
    for _ in range(_NUM_FIRST_STEPS):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error() or matcher.is_stopped():
            break
        matcher.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
    return matcher


def explain(matcher: Any) -> str:
    """Return why a matcher gave up, on one line and without its inner state."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    if error.startswith("NoExtension"):
        return "nothing matches it"
    if _ONE_OF in error:
        return "oneOf is not supported where its branches may overlap: write anyOf, which allows each branch alike"
    line = " ".join(error.split())
    return line if len(line) <= _MAX_ERROR_CHARACTERS else line[:_MAX_ERROR_CHARACTERS] + " ..."
