"""Render messages to a model's prompt text with its chat template, in the sandbox that Hugging Face templates expect.

A template comes with the checkpoint or from the operator, never from a client. Does not know tokenizers beyond the
names of special tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest, PromptTooCostly
from tokenmill.core.regular_file import read_regular
from tokenmill.serving.frontend.chat_messages import normalize_messages
from tokenmill.serving.frontend.template_budget import TakesLong, TemplateBudget
from tokenmill.serving.frontend.template_sandbox import TemplateSandbox

# By which templates are told whether the model is to think: Qwen's and others', and DeepSeek's.
_SWITCHES = ("enable_thinking", "thinking")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """A compiled template with the special tokens it may name.

    Attributes:
        source: the template's text.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        """Compile a template; `tool_source` is another one for requests with tools, where a checkpoint has two.

        Raises:
            InvalidCheckpoint: the template does not compile.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
            self._tool_template = self._sandbox.from_string(tool_source) if tool_source else self._template
        except jinja2.TemplateError as error:
            raise InvalidCheckpoint(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        budget: TemplateBudget | None = None,
    ) -> str:
        """Render a conversation to the prompt's text.

        Args:
            continue_final_message: leave the last message open, so that the model goes on with it.
            template_kwargs: further variables, e.g. `enable_thinking`; they never replace the template's own.
            budget: its time and size limits; None: unlimited time.

        Raises:
            InvalidRequest: the messages are malformed, the template refuses them, or takes too much for them.
            TakesLong: see `TemplateBudget`.
        """
        messages = normalize_messages(messages)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        extra = {name: value for name, value in (template_kwargs or {}).items() if name not in _RESERVED}
        template = self._tool_template if tools else self._template
        budget = budget or TemplateBudget()

        def rendered(shown: list[dict[str, Any]]) -> str:
            own = {"messages": shown, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
            return self._sandbox.render(template, {**self._special_tokens, **extra, **own}, budget)

        try:
            text = _with_plainer_messages(rendered, messages)
        except (PromptTooCostly, TakesLong):
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
        except Exception as error:  # a template is a program; whatever it raises concerns this request alone
            raise InvalidRequest("the chat template cannot render these messages", "messages") from error
        return _cut_after_final_message(text, messages[-1]) if continue_final_message else text

    def switches_thinking_off(self, kwargs: Mapping[str, Any]) -> bool:
        """Return True if these variables tell the template that the model must not think."""
        return any(kwargs.get(name) is False and re.search(rf"\b{name}\b", self.source) for name in _SWITCHES)

    @property
    def reads_effort(self) -> bool:
        """True if `with_effort` can tell the template an effort, or at least whether to think."""
        return "reasoning_effort" in self.source or "enable_thinking" in self.source

    def with_effort(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Translate `reasoning_effort` to this template's own variables: some only switch thinking on or off.

        Raises:
            InvalidRequest: it is given and the template has no such variable.
        """
        effort = kwargs.get("reasoning_effort")
        if effort is None or "reasoning_effort" in self.source:
            return kwargs
        if "enable_thinking" not in self.source:
            raise InvalidRequest("this model's chat template knows no reasoning_effort", "reasoning_effort")
        return {"enable_thinking": effort not in ("none", "minimal"), **kwargs}


def load_chat_template(
    folder: Path, special_tokens: Mapping[str, str], template_file: str | None = None
) -> ChatTemplate | None:
    """Load a model's template: the operator's file, chat_template.jinja, or tokenizer_config.json; None without one.

    Raises:
        InvalidConfig: `template_file` cannot be read or does not compile.
        InvalidCheckpoint: the checkpoint's own template does not.
    """
    if template_file is not None:
        try:
            if is_inline(template_file):
                return ChatTemplate(template_file, special_tokens)
            return ChatTemplate(read_regular(Path(template_file)).decode(), special_tokens)
        except OSError as error:
            raise InvalidConfig(f"--chat-template: cannot read {template_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidConfig(f"--chat-template: {template_file} is not UTF-8 text") from error
        except InvalidCheckpoint as error:
            where = "" if is_inline(template_file) else f" {template_file}"
            raise InvalidConfig(f"--chat-template{where}: {error}") from error
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidCheckpoint(f"cannot read {path}: {error}") from error
    entry = read_json(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(entry, str):
        return ChatTemplate(entry, special_tokens)
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry if isinstance(item, dict) and len(item) >= 2}
        if "default" in named:
            return ChatTemplate(named["default"], special_tokens, tool_source=named.get("tool_use"))
    return None


def is_inline(template: str) -> bool:
    """Return True if `--chat-template` holds template text (vLLM allows it) and not the name of a file."""
    return any(character in template for character in "{}\n") and not os.path.isfile(template)


def _with_plainer_messages(rendered: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """Render messages; if the template fails, render a plainer form that any template accepts.

    An earlier answer may have no content, or may have been cut within the arguments of a call; agents put texts of the
    system between turns, where some templates take none.
    """
    try:
        return rendered(messages)
    except (PromptTooCostly, TakesLong):
        raise
    except Exception:
        plainer = _without_late_system([_plainer(message) for message in messages])
        if plainer == messages:
            raise
        return rendered(plainer)


def _without_late_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which texts of the system behind the beginning are said by the user, beside their texts."""
    shown: list[dict[str, Any]] = []
    was_late = False
    for message in messages:
        last = shown[-1] if shown else message
        is_late = message["role"] == "system" != last["role"]
        said = {**message, "role": "user"} if is_late else message
        texts = [last.get("content"), said.get("content")]
        # Many of these templates want user and assistant in turn.
        if last["role"] == said["role"] == "user" and (is_late or was_late) and all(isinstance(t, str) for t in texts):
            shown[-1] = {**last, "content": "\n\n".join(map(str, texts))}
        else:
            shown.append(said)
        was_late = is_late
    return shown


def _plainer(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with text as its content, and an object as the arguments of each call."""
    plain = {**message, "content": ""} if message.get("content") is None else dict(message)
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _mapping(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return plain


def _mapping(arguments: Any) -> dict[str, Any]:
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _cut_after_final_message(text: str, message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise InvalidRequest("continue_final_message: the last message has images", "messages")
    end = text.rfind(content.strip())
    if not content.strip() or end < 0:
        raise InvalidRequest("continue_final_message: the template does not show the last message", "messages")
    # Some templates strip what they show, so the text is cut after what both have in common.
    return text[: end + len(content)] if text.startswith(content, end) else text[: end + len(content.strip())]
