import msgspec
import pytest

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.text_queries import ParsersFound
from tokenmill.serving.server.context import ToolParsers
from tokenmill.serving.server.process.parser_choice import NOTHING_FOUND, choose_parsers, needs_finding

FOUND = ParsersFound(
    id="", notation="hermes", notation_reason="it writes them", style="qwen3", style_reason="it thinks"
)
GPT_OSS = ParsersFound(id="", notation="openai", notation_reason="so", style="openai_gptoss", style_reason="so")


@pytest.mark.parametrize(
    ("flags", "found", "expected"),
    [
        ({}, FOUND, ToolParsers("hermes", True, "qwen3")),
        ({}, NOTHING_FOUND, ToolParsers("", False, "")),
        ({"tool_call_parser": "mistral"}, FOUND, ToolParsers("mistral", True, "qwen3")),
        (
            {"default_chat_template_kwargs": '{"enable_thinking": false}'},
            FOUND,
            ToolParsers("hermes", True, "qwen3", template_defaults={"enable_thinking": False}),
        ),
        ({"tool_call_parser": "none"}, FOUND, ToolParsers("", False, "qwen3")),
        ({"reasoning_parser": "none"}, FOUND, ToolParsers("hermes", True, "")),
        ({"reasoning_parser": "deepseek_r1"}, NOTHING_FOUND, ToolParsers("", False, "deepseek_r1")),
        ({"enable_auto_tool_choice": False}, FOUND, ToolParsers("hermes", False, "qwen3")),
        ({"enable_auto_tool_choice": True}, FOUND, ToolParsers("hermes", True, "qwen3")),
        ({}, GPT_OSS, ToolParsers("openai", True, "openai_gptoss")),
        ({"tool_call_parser": "openai"}, NOTHING_FOUND, ToolParsers("openai", True, "openai_gptoss")),
        ({"reasoning_parser": "none"}, GPT_OSS, ToolParsers("", False, "")),
        ({"tool_call_parser": "none"}, GPT_OSS, ToolParsers("", False, "openai_gptoss")),
    ],
)
def test_flags_go_before_what_is_found(flags: dict, found: ParsersFound, expected: ToolParsers) -> None:
    parsers = choose_parsers(ServerConfig(**flags).resolve(), found).parsers
    assert parsers == msgspec.structs.replace(expected, end_of_thinking=ServerConfig().reasoning_budget_message)


def test_variables_of_the_template_go_before_their_defaults() -> None:
    parsers = ToolParsers(template_defaults={"enable_thinking": False, "date": "today"})
    assert parsers.template_kwargs({}) == {"enable_thinking": False, "date": "today"}
    assert parsers.template_kwargs({"date": "never"}) == {"enable_thinking": False, "date": "never"}
    asked = {"reasoning_effort": "high"}
    assert parsers.template_kwargs(asked) == {"date": "today"} | asked, "an effort that is asked for is made"


def test_defaults_of_the_template_are_an_object() -> None:
    for given in ("[]", "{", "enable_thinking"):
        with pytest.raises(InvalidConfig, match="--default-chat-template-kwargs takes a JSON object"):
            ServerConfig(default_chat_template_kwargs=given).resolve()


def test_the_budget_of_thinking_is_that_of_the_flags() -> None:
    config = ServerConfig(reasoning_budget=7, reasoning_budget_message="Enough.")
    parsers = choose_parsers(config.resolve(), FOUND).parsers
    assert (parsers.budget, parsers.end_of_thinking) == (7, "Enough.")


def test_the_facts_say_which_and_why() -> None:
    assert choose_parsers(ServerConfig(tool_call_parser="none"), FOUND).facts == [
        ("tools", "no parser (--tool-call-parser none); auto tool choice is off"),
        ("thinking", "qwen3 (it thinks)"),
    ]
    assert choose_parsers(ServerConfig(), FOUND).facts[0][1] == "hermes (it writes them); auto tool choice is on"


def test_auto_tool_choice_needs_a_parser() -> None:
    with pytest.raises(InvalidConfig, match="--enable-auto-tool-choice: no template; name a parser with --tool-call"):
        choose_parsers(
            ServerConfig(enable_auto_tool_choice=True),
            ParsersFound(id="", notation="", notation_reason="no template", style="", style_reason=""),
        )


def test_nothing_is_looked_for_where_flags_name_both() -> None:
    assert needs_finding(ServerConfig(tool_call_parser="hermes"))
    assert not needs_finding(ServerConfig(tool_call_parser="none", reasoning_parser="qwen3"))
