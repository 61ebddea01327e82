"""Answers by a script, for tests of clients: the model runs and its tokens are drawn, but a grammar allows one text.

    [{"tool": "read", "results": 0, "text": "<tool_call>\\n{...}\\n</tool_call>"}, {"text": "Done."}]

A row counts for a chat with as many results of tools, and with a tool of this name; a row without them counts for any.
The first that counts is the answer, in the notation of the model; a chat for which none counts is answered freely. Rows
look at the chat alone, so that an answer that is asked for again is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidConfig

MAX_BYTES = 1 << 20


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer and the chats that get it.

    Attributes:
        results: messages with results of tools that the chat has; None: any number.
        tool: a function that the chat offers; "": with tools or without.
    """

    text: Annotated[str, Meta(min_length=1)]
    results: int | None = None
    tool: str = ""

    def counts_for(self, num_results: int, tools: Sequence[str]) -> bool:
        """Return True if this is the answer to a chat with these results and tools."""
        return self.results in (None, num_results) and (not self.tool or self.tool in tools)


class Script:
    """Rows in their order."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = tuple(rows)

    def answer(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the answer to a chat; "": it is free."""
        num_results = sum(message.get("role") == "tool" for message in messages)
        names = [tool["function"]["name"] for tool in tools or ()]
        return next((row.text for row in self._rows if row.counts_for(num_results, names)), "")


def read_script(path: str | None) -> Script:
    """Return the script of a file; without a file, all answers are free.

    Raises:
        InvalidConfig: it cannot be read, or is no script.
    """
    if path is None:
        return Script()
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InvalidConfig(f"--script {path}: larger than {MAX_BYTES} bytes")
        return Script(msgspec.json.decode(text, type=list[Row]))
    except OSError as error:
        raise InvalidConfig(f"--script {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise InvalidConfig(f"--script {path}: {error}") from error
