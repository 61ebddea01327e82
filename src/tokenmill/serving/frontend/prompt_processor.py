"""Turn a client's message into the engine's input with templates, encoding and grammars; long texts take long.

It does not know open requests, so it may run in a thread while other requests are served; see `PrepareThread`.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidRequest, PromptTooCostly, Unavailable
from tokenmill.core.media import MediaInput
from tokenmill.core.messages import CallRules, GenerateText, RequestRejected
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.core.text_queries import (
    Decoded,
    DecodeTokens,
    Encoded,
    EncodeText,
    FindParsers,
    ParsersFound,
    TextQuery,
    TextReply,
)
from tokenmill.serving.frontend.admission_control import estimated_tokens
from tokenmill.serving.frontend.attempt import ANY_TIME, Attempt
from tokenmill.serving.frontend.chat_template import ChatTemplate
from tokenmill.serving.frontend.free_text import FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, Thinking
from tokenmill.serving.frontend.media_prompts import MediaPrompts
from tokenmill.serving.frontend.parser_finder import FoundParser, ParserFinder
from tokenmill.serving.frontend.pooled_prompts import PooledPrompt, PooledPrompts
from tokenmill.serving.frontend.prompt_encoder import PromptEncoder
from tokenmill.serving.frontend.template_budget import TakesLong
from tokenmill.serving.frontend.thinking_budget import with_budget, with_effort_as_budget
from tokenmill.serving.frontend.tokenizer import Tokenizer
from tokenmill.serving.frontend.tool_parsers.protocol import read_tool
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS, STYLES

_logger = logging.getLogger(__name__)

# Tokens at the end of a prompt in which it is looked for the mark that begins thinking.
_PROMPT_END = 16

Question = GenerateText | TextQuery


class PreparedPrompt(msgspec.Struct, frozen=True):
    """The engine's input for one `GenerateText`.

    Attributes:
        token_ids: with a placeholder for each embedding of media. media: images or sound.
        params: with the grammar and the bad words in the form that the engine takes.
        ending: the grammar that ends its thinking at once.
    """

    token_ids: list[int]
    params: SamplingParams
    thinking: Thinking | None
    media: list[MediaInput]
    ending: Grammar | None = None


class PreparedTexts(msgspec.Struct, frozen=True):
    """The engine's input for the texts of a call, one for each of its ids."""

    prompts: list[PooledPrompt]


Prepared = PreparedPrompt | PreparedTexts | TextReply | RequestRejected


class PromptProcessor:
    """Converts clients' messages to the form that the engine takes, for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        any_whitespace: bool,
        max_string_length: int,
        media: MediaPrompts | None = None,
    ) -> None:
        self._pooled = PooledPrompts(tokenizer)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._architecture = ""
        self._prompts = PromptEncoder(tokenizer, chat_template, media)
        self._any_whitespace = any_whitespace
        self._max_string_length = max_string_length

    def engine_ready(self, ready: EngineReady) -> None:
        """Take in the limits of the engine."""
        self._prompts.max_model_len = ready.max_model_len
        self._prompts.vocab_size = ready.vocab_size
        self._pooled.engine_ready(ready)
        self._architecture = ready.architecture

    def prepare(self, message: Question, attempt: Attempt = ANY_TIME) -> Prepared:
        """Prepare a message, or return its refusal; errors in what a client sent are never raised.

        Raises:
            TakesLong: a hurried attempt is not enough for it.
        """
        try:
            match message:
                case GenerateText(texts=texts) if texts is not None:
                    self._prompts.check_takes_texts()
                    attempt.begin_encoding(estimated_tokens(message))
                    return PreparedTexts(self._pooled.encode(texts))
                case GenerateText():
                    return self._prompt(message, attempt)
                case EncodeText():
                    return self._encoded(message, attempt)
                case DecodeTokens():
                    self._prompts.check_to_decode(message.token_ids)
                    return Decoded(message.id, self._tokenizer.decode(message.token_ids))
                case FindParsers():
                    return self._find_parsers(message)
        except TakesLong:
            raise
        except Exception as error:
            return rejection(message, error)

    def _encoded(self, message: EncodeText, attempt: Attempt) -> Encoded:
        if message.wants == "text":
            return Encoded(message.id, [], [], text=self._prompts.rendered(message, attempt))
        ids = self._prompts.tokens(message, attempt)
        tokens = [self._tokenizer.token(token_id) or "" for token_id in ids]
        pieces = list(map(self._tokenizer.token_bytes, ids)) if message.wants == "pieces" else []
        return Encoded(message.id, ids, tokens, pieces)

    def _find_parsers(self, message: FindParsers) -> ParsersFound:
        if self._chat_template is None:
            notation = style = FoundParser("", "the model has no chat template")
        else:
            finder = ParserFinder(self._chat_template, self._tokenizer, self._architecture)
            notation, style = finder.notation(), finder.style()
        return ParsersFound(
            id=message.id,
            notation=notation.name,
            notation_reason=notation.reason,
            style=style.name,
            style_reason=style.reason,
        )

    def _prompt(self, message: GenerateText, attempt: Attempt) -> PreparedPrompt:
        message = with_effort_as_budget(message, self._chat_template)
        prompt, media = self._prompts.prompt(message, attempt)
        attempt.note("prepared")
        message.params.check_vocabulary(self._prompts.vocab_size)
        thinking = self._thinking(message, prompt)
        params, most = self._constrained(message, thinking), message.params.thinking_token_budget
        ending = None
        if thinking is not None:
            ending = with_budget(params.grammar, message, thinking, 0, self._tokenizer)
            if most is not None:
                grammar = with_budget(params.grammar, message, thinking, most, self._tokenizer)
                params = msgspec.structs.replace(params, grammar=grammar)
        if not params.spaces_between_special_tokens and self._tokenizer.joins_with_spaces:
            sentence = "this model's tokenizer joins all tokens with spaces"
            raise InvalidRequest(sentence, "spaces_between_special_tokens")
        if message.infill is not None and not params.ignore_eos:
            ends = dict.fromkeys((*params.stop_token_ids, *self._prompts.infill_marks()))
            params = msgspec.structs.replace(params, stop_token_ids=tuple(ends))
        if params.bad_words:
            bad_word_ids = self._prompts.bad_word_ids(params.bad_words)
            params = msgspec.structs.replace(params, bad_words=(), bad_word_ids=bad_word_ids)
        return PreparedPrompt(prompt, params, thinking, media, ending)

    def _constrained(self, message: GenerateText, thinking: Thinking | None) -> SamplingParams:
        """Return the parameters with the constraints on the answer in the form that the engine takes."""
        params, calls = msgspec.structs.replace(message.params, thinking_token_budget=None), message.calls
        if message.reasoning and STYLES[message.reasoning].needs_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        if message.forced_text:
            text = GrammarBuilder(self._prompts)
            forced = text.grammar([text.marker(message.forced_text)], "messages")
            return msgspec.structs.replace(params, structured_outputs=None, grammar=forced)
        if params.structured_outputs is None and calls is None:
            return params
        if calls is not None and NOTATIONS[calls.parser].needs_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        builder = GrammarBuilder(self._prompts, self._any_whitespace, self._max_string_length)
        if calls is not None and calls.is_lazy and params.ignore_eos:
            # Behind its end, an answer that goes on has no grammar.
            calls = msgspec.structs.replace(calls, is_lazy=False)
        grammar = answer_grammar(builder, params.structured_outputs, calls, message.tools, thinking)
        return msgspec.structs.replace(params, structured_outputs=None, grammar=grammar)

    def _thinking(self, message: GenerateText, prompt: list[int]) -> Thinking | None:
        """Return the thinking that precedes this answer; None: the model does not think."""
        if not message.reasoning:
            return None
        style = STYLES[message.reasoning]
        prompt_end = self._tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
        has_begun = style.has_begun(prompt_end, self._prompts.is_thinking_off(message))
        if message.messages and message.template_kwargs.get("continue_final_message") and not style.opening:
            last = message.messages[-1].get("content")
            has_begun = True if isinstance(last, str) and style.is_open_in(last) else None
        return None if has_begun is None else Thinking(style.begin, style.end, has_begun, style.opening)


def answer_grammar(
    builder: GrammarBuilder,
    outputs: StructuredOutputs | None,
    calls: CallRules | None,
    tools: list[dict[str, Any]] | None,
    thinking: Thinking | None,
) -> Grammar | None:
    """Return the grammar that an answer must match, or None for a free answer.

    Raises:
        InvalidRequest: a text given as a JSON schema is not one.
    """
    alternatives = []
    param = "tools"
    if outputs is not None and not (calls is not None and calls.is_required):
        opening = "" if thinking is None else builder.marker(thinking.opening)
        alternatives.append(f"{opening} {builder.answer(outputs)}")
        param = outputs.param
    if calls is not None and (calls.is_required or alternatives):
        named = [read_tool(tool) for tool in tools or ()]
        wanted = [tool for tool in named if tool.name in calls.names]
        alternatives.append(NOTATIONS[calls.parser].rule(builder, wanted, calls.is_parallel))
    if calls is not None and calls.is_lazy and not alternatives:
        return _lazy_grammar(builder, calls, tools, thinking)
    if not alternatives:
        return None
    rules = [] if thinking is None else [builder.thinking(thinking)]
    return builder.grammar([*rules, f"({' | '.join(alternatives)})"], param)


def _lazy_grammar(
    builder: GrammarBuilder, calls: CallRules, tools: list[dict[str, Any]] | None, thinking: Thinking | None
) -> Grammar:
    """Return the grammar of an answer that is free except in its calls."""
    notation = NOTATIONS[calls.parser]
    wanted = [tool for tool in map(read_tool, tools or ()) if tool.name in calls.names]
    text = FreeText(builder)
    answer = notation.lazy(text, [tool.loosened() for tool in wanted] if notation.writes_objects else wanted)
    # Where answers have an opening, thinking is one of their messages.
    before = thinking if thinking is None or not thinking.opening else None
    rule, is_optional = text.grammar(answer, before), not any(tool.is_strict for tool in wanted)
    return builder.grammar([rule], "tools", is_optional, None if text.marks is None else tuple(text.marks))


def ids_of(message: Question) -> list[str]:
    """Return the ids of the requests, or of the one call, that a message is for."""
    return message.ids if isinstance(message, GenerateText) else [message.id]


def rejection(message: Question, error: Exception) -> RequestRejected:
    """Turn an error into a rejection; report details only for client errors and temporary ones."""
    ids = ids_of(message)
    if isinstance(error, PromptTooCostly):
        _logger.warning("request %s: %s", ids[0], error)
    if isinstance(error, InvalidRequest):
        return RequestRejected(ids=ids, status=error.status, error=str(error), param=error.param, code=error.code)
    if isinstance(error, Unavailable):
        _logger.error("request %s could not be served: %s", ids, error)
        return RequestRejected(ids=ids, status=error.status, error=str(error))
    _logger.error("request %s could not be handled", ids, exc_info=error)
    return RequestRejected(ids=ids, status=500, error="the request could not be handled")
