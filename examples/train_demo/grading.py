"""Is a generated answer right? One rule per kind of skill; knows nothing of how the answer was made."""

from __future__ import annotations

import json
from typing import Any

from skills import Sample
from skills.stories import is_grammatical


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _tool_call(text: str) -> Any:
    body = text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    return _parsed(body) if len(body) == len(text.strip()) - len("<tool_call></tool_call>") else None


def is_right(sample: Sample, text: str, ended: bool) -> bool:
    """Grade ``text``, the answer without end token; ``ended`` says that the model ended it by itself.

    JSON and tool calls must parse and be equal as values; sums are graded by the number they end in, after
    the thought if there is one;
    stories must end, name everybody and everything asked for and follow the grammar; all else must be exactly the
    expected answer.
    """
    expected, text = sample.messages[-1], text.strip()
    if not ended:
        return False
    if "reasoning_content" in expected:
        thought, _, text = text.rpartition("</think>")
        if not thought.startswith("<think>"):
            return False
    return _is_right_answer(sample, text.strip())


def _is_right_answer(sample: Sample, text: str) -> bool:
    expected = sample.messages[-1]
    if sample.skill == "stories":
        return is_grammatical(text) and all(word in text for word in sample.facts["named"])
    if expected.get("tool_calls"):
        return bool(_tool_call(text) == expected["tool_calls"][0]["function"])
    if sample.skill.startswith("arithmetic"):
        return bool(text.rpartition(" = ")[2] == expected["content"].rpartition(" = ")[2])
    if sample.skill == "JSON":
        return bool(_parsed(text) == json.loads(expected["content"]))
    return bool(text == expected["content"])
