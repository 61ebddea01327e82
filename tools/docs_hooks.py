"""Hooks of `make docs`: what a document links to outside docs/ is not on the site, and is named there instead."""

import re
from typing import Any

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`[the README](../README.md)` becomes `the README (README.md in the repository)`."""
    return OUTSIDE.sub(lambda match: _named(match[1], match[2].removeprefix("../")), markdown)


def _named(words: str, path: str) -> str:
    return f"`{path}`" if words.strip("`/") in path else f"{words} (`{path}` in the repository)"
