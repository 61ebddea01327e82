"""Thinking that is switched off or over, and stop strings beside thinking, for all styles and however a text is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.seeding import seed_for
from tests.serving.frontend.test_text_processor import ready
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, wrapped
from tokenmill.core.answer import PieceKind
from tokenmill.core.messages import AddRequest, CallRules, GenerateText, StepOutputs, TextOutputs, TokenOutput
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.serving.frontend.chat_template import ChatTemplate
from tokenmill.serving.frontend.text_processor import TextProcessor

SEED = seed_for(__name__)
HELLO = [{"role": "user", "content": "hi"}]
BEGIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
# How families tell a template not to think, and what comes of it at the prompt's end.
SWITCHED_OFF = {
    "qwen3, closed in the prompt": (
        "qwen3", BEGIN + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
        {"enable_thinking": False},
    ),
    "smollm3, said in the system prompt": (
        "qwen3", "{% if not enable_thinking %}/no_think{% endif %}" + BEGIN, {"enable_thinking": False}
    ),
    "effort": ("qwen3", BEGIN + "{% if not enable_thinking %} {% endif %}", {"reasoning_effort": "none"}),
    "deepseek v3.1": (
        "deepseek_r1", BEGIN + "{% if thinking %}<think>{% else %}</think>{% endif %}", {"thinking": False}
    ),
    "deepseek, not shown": ("deepseek_r1", BEGIN + "{% if enable_thinking %}!{% endif %}", {"enable_thinking": False}),
    "gemma4": (
        "gemma4", BEGIN + "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}",
        {"enable_thinking": False},
    ),
    "granite": ("granite", BEGIN + "{% if thinking %}Think!{% endif %}", {"thinking": False}),
}  # fmt: skip
CASES = pytest.mark.parametrize(("style", "template", "kwargs"), SWITCHED_OFF.values(), ids=SWITCHED_OFF.keys())


class Frontend:
    """A text processor whose engine says what a test lets it say."""

    def __init__(self, template: str) -> None:
        self.tokenizer = wrapped(byte_level_tokenizer())
        self._text = TextProcessor(self.tokenizer, ChatTemplate(template))
        self._text.process(ready(max_model_len=2000))

    def ask(self, style: str, **fields: Any) -> AddRequest:
        message = GenerateText(
            **{"ids": ["r"], "params": SamplingParams(), "messages": HELLO, "reasoning": style} | fields
        )
        routed = self._text.process(message)
        assert routed.to_engine, routed.to_api
        return routed.to_engine[0]  # type: ignore[return-value]

    def answer(self, text: str, rng: random.Random) -> tuple[str, str, str, str | None]:
        """Thinking, text, arguments of calls and the stop string, of a text that comes in any parts."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        found = dict.fromkeys(PieceKind, "")
        while token_ids:
            count = rng.randint(1, 4)
            part, token_ids = token_ids[:count], token_ids[count:]
            reason = None if token_ids else FinishReason.LENGTH
            for routed in self._text.process(StepOutputs(1, [TokenOutput("r", part, reason)])).to_api:
                assert isinstance(routed, TextOutputs)
                (output,) = routed.outputs
                if output.answer is None:
                    found[PieceKind.TEXT] += output.text
                for piece in output.answer or ():
                    found[piece.kind] += piece.text
                if output.finish_reason is not None:
                    stop = output.stop_reason
                    return found[PieceKind.REASONING], found[PieceKind.TEXT], found[PieceKind.CALL], stop  # type: ignore
        raise AssertionError("it did not end")


@CASES
def test_a_grammar_begins_with_the_answer_where_thinking_is_off(
    style: str, template: str, kwargs: dict[str, Any]
) -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputs(json={"type": "integer"}))
    request = Frontend(template).ask(style, template_kwargs=kwargs, params=asked)
    plain = Frontend(template).ask("", template_kwargs=kwargs, params=asked)
    assert request.params.grammar == plain.params.grammar
    thinks = {name: "high" if name == "reasoning_effort" else True for name in kwargs}
    request = Frontend(template).ask(style, template_kwargs=thinks, params=asked)
    assert request.params.grammar != plain.params.grammar


@CASES
def test_all_is_content_where_thinking_is_off(style: str, template: str, kwargs: dict[str, Any]) -> None:
    print(f"seed {SEED}")
    frontend = Frontend(template)
    frontend.ask(style, template_kwargs=kwargs)
    assert frontend.answer("The answer is 4.", random.Random(SEED)) == ("", "The answer is 4.", "", None)


@pytest.mark.parametrize("style", ["qwen3", "deepseek_r1", "granite", "gemma4"])
def test_a_message_that_is_continued_thinks_on_only_if_it_was_thinking(style: str) -> None:
    from tokenmill.serving.frontend.tool_parsers.select import STYLES

    begin, end = STYLES[style].begin, STYLES[style].end
    for said, expected in (
        (f"{begin} so far", ("and on", "")),
        ("I say", ("", "and on")),
        (f"{begin}x{end} I say", ("", "and on")),
    ):
        frontend = Frontend(BEGIN)
        messages = [*HELLO, {"role": "assistant", "content": said}]
        frontend.ask(style, messages=messages, template_kwargs={"continue_final_message": True})
        assert frontend.answer("and on", random.Random(SEED))[:2] == expected, said


ANSWERS = {
    "qwen3": "<think>it needs a needle</think>\n\nWho needs it?",
    "deepseek_r1": "it needs a needle</think>Who needs it?",
    "granite": "Here is my thought process: it needs a needle Here is my response: Who needs it?",
    "gemma4": "<|channel>thought\nit needs a needle<channel|>Who needs it?",
    "openai_gptoss": "<|channel|>analysis<|message|>it needs a needle<|end|><|start|>assistant"
    "<|channel|>final<|message|>Who needs it?",
}  # fmt: skip


@pytest.mark.parametrize("style", ANSWERS)
@pytest.mark.parametrize(("stop", "shown"), [("needs", "Who "), ("needle", "Who needs it?"), ("it?!", "Who needs it?")])
def test_stop_strings_count_from_the_answer_on(style: str, stop: str, shown: str) -> None:
    print(f"seed {SEED}")
    for number in range(20):
        frontend = Frontend(BEGIN)
        frontend.ask(style, params=SamplingParams(stop=(stop,), skip_special_tokens=False))
        thinking, text, _, reason = frontend.answer(ANSWERS[style], random.Random(SEED + number))
        assert (thinking, text, reason) == ("it needs a needle", shown, stop if shown == "Who " else None)


def test_a_stop_string_that_is_included_stands_at_the_end_of_the_answer() -> None:
    frontend = Frontend(BEGIN)
    frontend.ask("qwen3", params=SamplingParams(stop=("needs",), include_stop_str_in_output=True))
    assert frontend.answer(ANSWERS["qwen3"], random.Random(SEED))[1:] == ("Who needs", "", "needs")


def test_stop_strings_end_calls_behind_thinking() -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    for number in range(20):
        frontend = Frontend(BEGIN)
        rules = CallRules("hermes", ["find"], is_required=False, is_parallel=True)
        frontend.ask("qwen3", tools=tools, calls=rules, params=SamplingParams(stop=("STOP",)))
        text = '<think>STOP</think>Look.\n<tool_call>\n{"name": "find", "arguments": {"a": "bSTOPc"}}\n</tool_call>'
        thinking, shown, arguments, reason = frontend.answer(text, random.Random(SEED + number))
        assert (thinking, shown, reason) == ("STOP", "Look.", "STOP")
        assert '{"a": "b'.startswith(arguments)


@pytest.mark.parametrize("stop", ["STOP", "a"])
def test_stop_strings_end_no_call_that_a_grammar_keeps(stop: str) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    for number in range(20):
        frontend = Frontend(BEGIN)
        rules = CallRules("hermes", ["find"], is_required=False, is_parallel=True, is_lazy=True)
        frontend.ask("qwen3", tools=tools, calls=rules, params=SamplingParams(stop=(stop,)))
        call = '{"name": "find", "arguments": {"a": "bSTOPc"}}'
        text = f"<think>{stop}</think>Look.\n<tool_call>\n{call}\n</tool_call>\nNo {stop} more"
        thinking, shown, arguments, reason = frontend.answer(text, random.Random(SEED + number))
        assert (thinking, shown, reason) == (stop, "Look.\nNo", stop)
        assert arguments == '{"a": "bSTOPc"}'


def test_an_answer_in_harmony_without_a_header_loses_nothing_that_was_held_back() -> None:
    frontend = Frontend(BEGIN)
    frontend.ask("openai_gptoss", params=SamplingParams(stop=("ends here",)))
    assert frontend.answer("It ends he", random.Random(SEED)) == ("", "It ends he", "", None)
