"""Read how long a model may think before it answers, and write how its thinking is ended then."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from tokenmill.core.messages import GenerateText
from tokenmill.core.sampling_params import Grammar, ThinkingBudget
from tokenmill.serving.frontend.grammar_builder import Thinking, anything

if TYPE_CHECKING:  # API processes read `EFFORTS` alone
    from tokenmill.serving.frontend.chat_template import ChatTemplate
    from tokenmill.serving.frontend.tokenizer import Tokenizer

# Tokens of thinking where a client asks for an effort that the template does not read; other efforts have no bound.
EFFORTS = MappingProxyType({"none": 0, "minimal": 0, "low": 1024, "medium": 8192})
_EFFORT = "reasoning_effort"
# Nothing stirs it, so that no matcher is asked before a budget is used up.
ANYTHING = Grammar(anything(), "thinking_token_budget", marks=())


def with_effort_as_budget(message: GenerateText, template: ChatTemplate | None) -> GenerateText:
    """Return a message of a model that thinks, with a budget for the effort that its template cannot read."""
    effort = message.template_kwargs.get(_EFFORT)
    if not message.reasoning or template is None or not isinstance(effort, str) or _EFFORT in template.source:
        return message
    changes = {}
    if not template.reads_effort:
        changes["template_kwargs"] = {k: v for k, v in message.template_kwargs.items() if k != _EFFORT}
    params = message.params
    if params.thinking_token_budget is None and effort in EFFORTS:
        params = msgspec.structs.replace(params, thinking_token_budget=EFFORTS[effort])
    return msgspec.structs.replace(message, params=params, **changes)


def with_budget(
    grammar: Grammar | None, message: GenerateText, thinking: Thinking, most: int, tokenizer: Tokenizer
) -> Grammar:
    """Return the grammar of an answer, or one that allows all, with a budget of `most` tokens of thinking."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    begin, end = ids(thinking.begin), ids(thinking.end)
    budget = ThinkingBudget(most, begin, end, ids(message.end_of_thinking) + end, thinking.has_begun)
    return msgspec.structs.replace(grammar or ANYTHING, thinking=budget)
