"""Translate grammars from GBNF, the notation of llama.cpp, to that of Lark."""

from __future__ import annotations

import re

from tokenmill.core.errors import InvalidRequest

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# A character by its number; the translator has its trouble with leading zeros.
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
# Rules times characters: the translator looks through all rules once for each that it settles. A quarter of a second.
_MAX_WORK = 1 << 25


def is_gbnf(text: str) -> bool:
    """Return True if a grammar has rules in GBNF notation, `name ::= ...`."""
    return _RULE.search(text) is not None


def to_lark(text: str, param: str) -> str:
    """Translate a grammar to Lark; its rule `root` becomes `start`.

    Raises:
        InvalidRequest: it is not GBNF, or too large.
    """
    if len(_RULE.findall(text)) * len(text) > _MAX_WORK:
        raise InvalidRequest("the GBNF grammar is too large: write it in Lark's notation", param)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_ESCAPE.sub(_character, text)).removeprefix("%llguidance {}\n\n")
    except Exception as error:  # the translator raises plain ones, and a RecursionError where it is nested too deep
        raise InvalidRequest(f"the GBNF grammar cannot be used: {' '.join(str(error).split())[:300]}", param) from error


def _character(escape: re.Match[str]) -> str:
    number = int(escape[1], 16)
    return chr(number) if number >= 0x80 and not 0xD800 <= number < 0xE000 else escape[0]
