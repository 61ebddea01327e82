"""Show the pictures in results of tools: templates write results as text, so the user shows the pictures behind them.

Does not know whether the model sees pictures; that is checked where they are fetched, as for any other.
"""

from __future__ import annotations

from typing import Any

# A result that is a picture alone would be empty.
_SEE = "The result is shown below."


def pictures_behind_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which results are text, and their pictures stand at the beginning of the user's next message.

    All results of one turn stay together; where no message of the user follows, one with the pictures is added.
    """
    shown: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for given in messages:
        message = given
        if message["role"] == "tool" and isinstance(message["content"], list):
            waiting += [part for part in message["content"] if part["type"] != "text"]
            text = "\n".join(part["text"] for part in message["content"] if part["type"] == "text")
            message = message | {"content": text or _SEE}
        elif message["role"] == "user" and waiting:
            message = message | {"content": [*waiting, *_parts(message["content"])]}
            waiting = []
        elif message["role"] != "tool" and waiting:
            shown.append({"role": "user", "content": waiting})
            waiting = []
        shown.append(message)
    return [*shown, {"role": "user", "content": waiting}] if waiting else shown


def _parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
