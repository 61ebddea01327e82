"""Keep what clients change with every call out of the part of a prompt that the prefix cache could supply.

A prompt is found again up to its first changed token, so one changed line at its head costs all behind it. `RULES` is
the table of blocks that are known to change; a further client is a further row. Only the system part of a chat is
looked at, as text, before any template sees it. A block is moved to the head of the first user message, since many
templates write the tools behind the system prompt. Nothing is moved past a text that its client has marked with
`cache_control`: it says itself that all up to there is stable.

Does not know tokens or which prompts came before; see `PrefixWatch` for changes that no rule knows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

UNKNOWN = "unknown"
_SYSTEM = ("system", "developer")


class VolatileBlock(msgspec.Struct, frozen=True):
    """One row of the table.

    Attributes:
        name: its name in usage and metrics.
        writer: the client that writes it.
        mark: a text that stands in it, by which a change that was not prevented is named.
        pattern: finds the block in a text of the system part, in its group `block` if it has one.
        action: drop it, move it, or only name it where it breaks a prefix.
        evidence: reports of what it costs.
    """

    name: str
    writer: str
    mark: str
    pattern: str
    action: Literal["drop", "move", "report"]
    evidence: str


# Patterns look at each character a bounded number of times: texts come from clients.
RULES = (
    VolatileBlock(
        "claude-billing-header",
        "Claude Code, since 2.1.36: a checksum that is another in each call",
        "x-anthropic-billing-header",
        r"\A\s{0,8}x-anthropic-billing-header:[^\n]*\n?",
        "drop",
        "vllm-project/vllm#36829, ggml-org/llama.cpp#20623, anthropics/claude-code#68900",
    ),
    VolatileBlock(
        "claude-git-status",
        "Claude Code: another in each session; before 2.1.267 in each call",
        "gitStatus:",
        r"(?ms)^gitStatus: This is the git status\b.*\Z",
        "move",
        "anthropics/claude-code#47107",
    ),
    VolatileBlock(
        "env-date",
        "opencode, Kilo Code: another after midnight",
        "Today's date:",
        r"<env>[^<]{0,2000}?(?P<block>\n[ \t]*Today's date: [^\n<]{1,40}(?=\n))",
        "move",
        "sst/opencode#18710: 2,151 of 28,491 tokens were found again",
    ),
    VolatileBlock(
        "system-reminder",
        "opencode: wanders to the newest message of the user",
        "<system-reminder>",
        "",
        "report",
        "sst/opencode#23595",
    ),
)
CAUSES = (*(rule.name for rule in RULES), UNKNOWN)
_ACTIVE = [(rule, re.compile(rule.pattern)) for rule in RULES if rule.action != "report"]


def settle(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages with known volatile blocks dropped or moved, and the names of their rules."""
    end = next((i for i, one in enumerate(messages) if one.get("role") not in _SYSTEM), len(messages))
    system = [_texts(one.get("content")) for one in messages[:end]]
    last_marked = max((i for i, texts in enumerate(system) if any(one.is_marked for one in texts)), default=-1)
    behind = list(messages[end:])
    names: list[str] = []
    moved: list[str] = []
    for i, texts in enumerate(system):
        inside = max((j for j, one in enumerate(texts) if one.is_marked), default=-1) if i == last_marked else -1
        for j, text in enumerate(texts):
            is_movable = i >= last_marked and j > inside and _takes_blocks(behind)
            text.settle(names, moved if is_movable else None)
    if not names:
        return list(messages), []
    if moved:
        behind[0] = _with_blocks(behind[0], moved)
    kept = [_with_texts(one, texts) for one, texts in zip(messages[:end], system, strict=True)]
    return [*(one for one in kept if one is not None), *behind], list(dict.fromkeys(names))


def cause_of(text: str) -> str:
    """Return the name of the rule whose mark stands in a text, or `UNKNOWN`."""
    return next((rule.name for rule in RULES if rule.mark in text), UNKNOWN)


@dataclass(slots=True)
class _Text:
    """One text of the system part; `part`: the content part that it stands in, if it stands in one."""

    text: str
    part: dict[str, Any] | None = None
    is_changed: bool = False

    @property
    def is_marked(self) -> bool:
        return self.part is not None and bool(self.part.get("cache_control"))

    def settle(self, names: list[str], moved: list[str] | None) -> None:
        """Apply the rules; `moved` gets what is to be moved, None: nothing may be."""
        for rule, pattern in _ACTIVE:
            found = None if rule.mark not in self.text else pattern.search(self.text)
            if found is None or (rule.action == "move" and moved is None):
                continue
            group = "block" if "block" in pattern.groupindex else 0
            if rule.action == "move" and moved is not None:
                moved.append(found[group].strip())
            self.text = self.text[: found.start(group)] + self.text[found.end(group) :]
            self.is_changed = True
            names.append(rule.name)


def _texts(content: object) -> list[_Text]:
    if isinstance(content, str):
        return [_Text(content)]
    parts = content if isinstance(content, list) else []
    shown = [one for one in parts if isinstance(one, dict) and isinstance(one.get("text"), str)]
    return [_Text(one["text"], one) for one in shown]


def _with_texts(message: dict[str, Any], texts: list[_Text]) -> dict[str, Any] | None:
    """Return a message with these texts, or None if they have left it empty."""
    changed = [one for one in texts if one.is_changed]
    if not changed:
        return message
    if changed[0].part is None:
        return {**message, "content": changed[0].text} if changed[0].text.strip() else None
    new = {id(one.part): one.text for one in changed}
    parts = [one if id(one) not in new else {**one, "text": new[id(one)]} for one in message["content"]]
    kept = [one for one in parts if one.get("text") != "" or "text" not in one]
    return {**message, "content": kept} if kept else None


def _takes_blocks(messages: Sequence[dict[str, Any]]) -> bool:
    """Return True if the first message can carry moved blocks."""
    return bool(messages) and messages[0].get("role") == "user" and isinstance(messages[0].get("content"), str | list)


def _with_blocks(message: dict[str, Any], moved: Sequence[str]) -> dict[str, Any]:
    """Return a message with these blocks at its head."""
    block, content = "\n".join(moved) + "\n", message["content"]
    head: Any = f"{block}\n{content}" if isinstance(content, str) else [{"type": "text", "text": block}, *content]
    return {**message, "content": head}
