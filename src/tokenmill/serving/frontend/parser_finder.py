"""Find how a model writes calls and marks its thinking: by its template, else by its family.

A template is shown a short chat with tools and a call, and the text that it renders is looked at, not its source: the
same text can be written in many ways. A notation is believed if its parser reads the rendered call back; where no call
is rendered, if the marks that it needs are tokens of the vocabulary. Does not know flags, which override it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.core.answer import PieceKind, joined
from tokenmill.core.errors import TokenMillError
from tokenmill.serving.frontend.answer_parser import AnswerParser
from tokenmill.serving.frontend.chat_template import ChatTemplate
from tokenmill.serving.frontend.reasoning import ReasoningStyle
from tokenmill.serving.frontend.template_budget import TakesLong, TemplateBudget
from tokenmill.serving.frontend.tokenizer import Tokenizer
from tokenmill.serving.frontend.tool_parsers import harmony
from tokenmill.serving.frontend.tool_parsers.protocol import read_tool
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS, STYLES

# One rendering takes a few milliseconds; a template that takes this long is not looked at.
RENDER_SECONDS = 1.0


class FoundParser(msgspec.Struct, frozen=True):
    """A parser's name, as its flag has it, and the reason; the name "" means that there is none."""

    name: str
    reason: str


class _Row(msgspec.Struct, frozen=True):
    """The texts by which a notation is recognized.

    Attributes:
        call: text in a rendered call.
        shown: text by which a template that renders no calls tells the model about tools; "": there is none.
        tokens: marks that models which write it have as tokens.
    """

    notation: str
    call: str
    shown: str
    tokens: tuple[str, ...]


_MARK = re.compile(r"<[^<>]+>")
# The first row that fits wins, so a notation that has the marks of another one, and more, stands above it.
_ROWS = (
    _Row("openai", "to=functions.", "namespace functions {", ("<|channel|>", "<|message|>", "<|call|>")),
    _Row("qwen3_coder", "<function=", "<function=", ("<tool_call>", "</tool_call>")),
    _Row("gemma4", "<|tool_call>call:", "<|tool>", ("<|tool_call>", "<tool_call|>")),
    _Row("lfm2", "<|tool_call_start|>", "<|tool_list_start|>", ("<|tool_call_start|>", "<|tool_call_end|>")),
    _Row("lfm2", "<|tool_call_start|>", "List of tools: [", ("<|tool_call_start|>", "<|tool_call_end|>")),
    _Row("phi4_mini_json", "<|/tool_call|>", "<|/tool|>", ("<|tool_call|>", "<|/tool_call|>")),
    _Row("granite", "<|tool_call|>", "<|tool_call|>", ("<|tool_call|>",)),
    _Row("mistral", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", ("[TOOL_CALLS]",)),
    _Row("hermes", "<tool_call>", "<tool_call>", ("<tool_call>", "</tool_call>")),
    _Row("llama3_json", '{"name"', "", ()),
    _Row("pythonic", "[get_weather(", "", ()),
)

# Styles in the order in which they are looked for. `qwen3` reads what `deepseek_r1` does where a prompt has the mark.
_STYLES = (harmony.STYLE_NAME, "gemma4", "granite", "qwen3")

_FAMILY_NOTATIONS: Mapping[str, str] = MappingProxyType(
    {
        "GptOssForCausalLM": "openai",
        "Qwen3_5ForCausalLM": "qwen3_coder",
        "Qwen3_5ForConditionalGeneration": "qwen3_coder",
        "Qwen3_5MoeForCausalLM": "qwen3_coder",
        "Qwen3_5MoeForConditionalGeneration": "qwen3_coder",
        "Gemma4ForCausalLM": "gemma4",
        "Gemma4ForConditionalGeneration": "gemma4",
        "Lfm2ForCausalLM": "lfm2",
        "Lfm2MoeForCausalLM": "lfm2",
        "Phi3ForCausalLM": "phi4_mini_json",
        "GraniteForCausalLM": "granite",
        "GraniteMoeHybridForCausalLM": "hermes",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "hermes",
        "Qwen2_5_VLForConditionalGeneration": "hermes",
        "Qwen3ForCausalLM": "hermes",
        "Qwen3MoeForCausalLM": "hermes",
        "Qwen3NextForCausalLM": "hermes",
        "Qwen3VLForConditionalGeneration": "hermes",
        "Qwen3VLMoeForConditionalGeneration": "hermes",
        "SmolLM3ForCausalLM": "hermes",
    }
)
_FAMILY_STYLES: Mapping[str, str] = MappingProxyType(
    {
        "GptOssForCausalLM": harmony.STYLE_NAME,
        "Gemma4ForCausalLM": "gemma4",
        "Gemma4ForConditionalGeneration": "gemma4",
        "Qwen3_5ForCausalLM": "qwen3",
        "Qwen3_5ForConditionalGeneration": "qwen3",
        "Qwen3_5MoeForCausalLM": "qwen3",
        "Qwen3_5MoeForConditionalGeneration": "qwen3",
        "SmolLM3ForCausalLM": "qwen3",
    }
)


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "Look it up.", "parameters": parameters}}


_TOOLS = [_tool("get_weather"), _tool("get_time")]
_ARGUMENTS = {"city": "Oslo"}
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "get_weather", "arguments": _ARGUMENTS}}
_USER = {"role": "user", "content": "How is the weather?"}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_THOUGHT, _ANSWER = "It may rain today.", "Take an umbrella."
_NOTHING = "the template shows none that is known"


class ParserFinder:
    """Looks at one model's template and vocabulary."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, architecture: str) -> None:
        """`architecture`: the model's entry of `architectures`, which is its family."""
        self._template = template
        self._tokenizer = tokenizer
        self._architecture = architecture

    def notation(self) -> FoundParser:
        """Return the parser of calls."""
        prompt = self._rendered([_USER], tools=_TOOLS)
        call = _added(prompt, self._rendered([_USER, _CALLING], tools=_TOOLS, add_generation_prompt=False))
        if _ARGUMENTS["city"] in call:
            return self._by_call(call)
        plain = self._rendered([_USER])
        for row in _ROWS:
            if row.shown and row.shown in prompt and row.shown not in plain and self._has_tokens(row.tokens):
                return FoundParser(row.notation, f"the template tells of tools with {row.shown}")
        name = _FAMILY_NOTATIONS.get(self._architecture, "")
        if not name or not self._has_tokens(next(row.tokens for row in _ROWS if row.notation == name)):
            return FoundParser("", _NOTHING)
        return FoundParser(name, f"by the family, {self._architecture}: the template renders no calls")

    def style(self) -> FoundParser:
        """Return the parser of thinking."""
        thinking = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
        texts = [
            *(self._rendered([_USER], template_kwargs=_switched(is_on)) for is_on in (True, False)),
            self._rendered([_USER, thinking], add_generation_prompt=False),
            self._rendered([_USER, _CALLING | {"reasoning_content": _THOUGHT}], tools=_TOOLS),
        ]
        for name in _STYLES:
            begin = STYLES[name].begin
            if not self._can_be_read(STYLES[name]):
                continue
            if any(begin in text for text in texts):
                return FoundParser(name, f"the template writes {begin}")
            if self._drops_thinking(name):
                return FoundParser(name, f"the template drops earlier thinking after {begin}")
        name = _FAMILY_STYLES.get(self._architecture, "")
        if not name or not self._has_tokens(_marks(STYLES[name])):
            return FoundParser("", _NOTHING)
        return FoundParser(name, f"by the family, {self._architecture}")

    def _by_call(self, call: str) -> FoundParser:
        """Return the notation of a rendered call: that of the first row whose parser reads it back."""
        for row in _ROWS:
            if row.call in call and self._reaches_parser(row) and _reads_back(row.notation, call):
                return FoundParser(row.notation, f"the template writes calls with {row.call}")
        return FoundParser("", "no parser reads the calls that the template writes")

    def _drops_thinking(self, name: str) -> bool:
        """Return True if the template cuts the thinking out of an earlier answer that has it in its text."""
        answer = f"{STYLES[name].begin}\n{_THOUGHT}\n{STYLES[name].end}\n\n{_ANSWER}"
        text = self._rendered([_USER, {"role": "assistant", "content": answer}, _USER])
        return _ANSWER in text and _THOUGHT not in text

    def _rendered(self, messages: list[dict[str, Any]], **how: Any) -> str:
        """Return the rendered text; "" if the template refuses these messages."""
        try:
            return self._template.render(messages, budget=TemplateBudget(RENDER_SECONDS), **how)
        except (TokenMillError, TakesLong):
            return ""

    def _has_tokens(self, marks: tuple[str, ...]) -> bool:
        return all(self._tokenizer.token_id(mark) is not None for mark in marks)

    def _reaches_parser(self, row: _Row) -> bool:
        """Return True if the marks of calls reach the parser: as tokens that are kept, or as text."""
        if NOTATIONS[row.notation].needs_special_tokens:
            return self._has_tokens(row.tokens)
        return all(map(self._is_shown, row.tokens))

    def _can_be_read(self, style: ReasoningStyle) -> bool:
        """Return True if the marks of thinking reach the parser, likewise."""
        if style.needs_special_tokens:
            return self._has_tokens(_marks(style))
        return self._is_shown(style.begin) and self._is_shown(style.end)

    def _is_shown(self, mark: str) -> bool:
        return mark in self._tokenizer.decode(self._tokenizer.encode(mark, add_special_tokens=False))


def _marks(style: ReasoningStyle) -> tuple[str, ...]:
    return tuple(_MARK.findall(style.begin + style.end))


def _switched(is_on: bool) -> dict[str, bool]:
    return {"enable_thinking": is_on, "thinking": is_on}


def _added(prompt: str, whole: str) -> str:
    """Return the answer's part of a text, from the last line or mark that it shares with the prompt on.

    A prompt may end with the beginning of thinking, which an answer that is over does not have.
    """
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    pairs = enumerate(zip(prompt, whole, strict=False))
    shared = prompt[: next((i for i, (one, other) in pairs if one != other), len(whole))]
    return whole[max(shared.rfind("\n"), shared.rfind(">"), shared.rfind("]")) + 1 :]


def _reads_back(notation: str, text: str) -> bool:
    """Return True if a notation's parser reads the call in a text."""
    parser: AnswerParser | harmony.HarmonyParser = harmony.HarmonyParser(shows_calls=True)
    if notation != harmony.NOTATION_NAME:
        parser = AnswerParser(None, NOTATIONS[notation].parser([read_tool(tool) for tool in _TOOLS]))
    pieces = joined([*parser.feed(text, 1), *parser.finish()])
    calls = [piece for piece in pieces if piece.kind is PieceKind.CALL]
    try:
        return [(one.name, json.loads(one.text)) for one in calls] == [("get_weather", _ARGUMENTS)]
    except json.JSONDecodeError:
        return False
