"""Turn a client's prompt into token ids and check them: the engine gets nothing that was not checked here."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from tokenmill.core.errors import InvalidRequest, PromptTooLong
from tokenmill.core.infill import Infill
from tokenmill.core.media import MediaInput
from tokenmill.core.messages import GenerateText
from tokenmill.core.text_queries import EncodeText
from tokenmill.serving.frontend.attempt import Attempt
from tokenmill.serving.frontend.chat_template import ChatTemplate
from tokenmill.serving.frontend.infill_prompt import InfillPrompt
from tokenmill.serving.frontend.media_prompts import MediaPrompts
from tokenmill.serving.frontend.tokenizer import Tokenizer

# Of a prompt that will be cut to fit, or is only to be counted, this many contexts are worth encoding.
_MOST_TO_CUT = 8
# A character has at most so many bytes in JSON as msgspec writes it, where most have one.
_MOST_BYTES = 6


class PromptEncoder:
    """Renders, encodes and checks prompts against the limits of the engine.

    Attributes:
        max_model_len: most prompt and output tokens together; 0 until the engine is ready.
        vocab_size: the size of the model's vocabulary; ids must be below it.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, media: MediaPrompts | None = None
    ) -> None:
        """`media` builds prompts of chats with images or sound; None: the model takes text only."""
        self._tokenizer = tokenizer
        self._media = media
        self._chat_template = chat_template
        self.max_model_len = 0
        self.vocab_size = tokenizer.vocab_size

    @functools.cached_property
    def _infill(self) -> InfillPrompt:
        return InfillPrompt(self._tokenizer, self.vocab_size)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling; None if the model lacks it, though the tokenizer may have it."""
        token_id = self._tokenizer.token_id(token)
        return None if token_id is None or token_id >= self.vocab_size else token_id

    def ids_outside_text(self) -> Sequence[int]:
        """Return the model's ids that are no text of their own; see `Tokenizer.ids_outside_text`."""
        return self._tokenizer.ids_outside_text(self.vocab_size)

    def prompt(self, message: GenerateText, attempt: Attempt) -> tuple[list[int], list[MediaInput]]:
        """Return the token ids of a request's prompt, and its media.

        Raises:
            InvalidRequest: it is empty, too long, outside the vocabulary, or the chat template refuses it.
            TakesLong: see `Attempt`; `tokens` raises it too.
        """
        param = "prompt" if message.messages is None else "messages"
        is_cut = message.truncate_prompt_tokens is not None
        media: list[MediaInput] = []
        if message.token_ids is not None:
            token_ids = message.token_ids
        elif message.infill is not None:
            token_ids = self._gap(message, message.infill, attempt)
        elif message.messages is not None:
            token_ids, media = self._chat(message, attempt, is_cut, message.add_special_tokens is True)
        else:
            adds_special_tokens = message.add_special_tokens is not False
            token_ids = self._encode(
                message.text or "", attempt, param, is_cut, adds_special_tokens=adds_special_tokens
            )
        # What names its engine by ids is an operator's probe, which any model answers.
        if self._media is not None and (message.engine is None or message.token_ids is None):
            self._media.check(media, param)
        if not token_ids:
            raise InvalidRequest("the prompt is empty: at least one token is needed", param)
        check_ids(token_ids, self.vocab_size, param)
        if message.truncate_prompt_tokens is not None:
            if media:
                raise InvalidRequest(
                    f"a prompt with {self._media.nouns if self._media else 'media'} cannot be cut",
                    "truncate_prompt_tokens",
                )
            num_output_tokens = 0 if message.needs_no_output else message.params.max_tokens or 1
            token_ids = self._cut(token_ids, message.truncate_prompt_tokens, num_output_tokens)
        if self.max_model_len and len(token_ids) >= self.max_model_len + message.needs_no_output:
            raise self._too_long(f"{len(token_ids)} tokens", param, needs_output=not message.needs_no_output)
        return token_ids, media

    def check_takes_texts(self) -> None:
        """Refuse texts without media, where the model knows no such prompts.

        Raises:
            InvalidRequest: saying what the model is for.
        """
        if self._media is not None:
            self._media.check((), "input")

    def infill_marks(self) -> Sequence[int]:
        """Return the ids of the tokens that mark the parts of a text with a gap."""
        return sorted(self._infill.ids.values())

    def is_thinking_off(self, message: GenerateText) -> bool:
        """Return True if the chat template was told that the model must not think."""
        if self._chat_template is None or message.messages is None:
            return False
        kwargs = self._chat_template.with_effort(message.template_kwargs)
        return self._chat_template.switches_thinking_off(kwargs)

    def tokens(self, message: EncodeText, attempt: Attempt) -> list[int]:
        """Return the token ids of a text or a chat, which may be a few contexts long.

        Raises:
            InvalidRequest: it is longer, or the chat template refuses the messages.
        """
        param = "prompt" if message.messages is None else "messages"
        if message.messages is not None and self._media is not None:
            return self._chat(message, attempt, True, message.add_special_tokens)[0]
        text = (message.text or "") if message.messages is None else self._render(message, attempt, is_cut=True)
        return self._encode(text, attempt, param, is_cut=True, adds_special_tokens=message.add_special_tokens)

    def rendered(self, message: EncodeText, attempt: Attempt) -> str:
        """Return the text that the chat template makes of a chat, raising as `tokens` does."""
        return self._render(message, attempt, is_cut=True)

    def check_to_decode(self, token_ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary, and more ids than any call can have produced.

        Raises:
            InvalidRequest: naming the fault.
        """
        if self.max_model_len and len(token_ids) > _MOST_TO_CUT * self.max_model_len:
            sentence = f"tokens: {len(token_ids)} ids; at most {_MOST_TO_CUT * self.max_model_len} at once"
            raise InvalidRequest(sentence, "tokens")
        # A tokenizer may have more tokens than the model, and /tokenize says which.
        check_ids(token_ids, max(self.vocab_size, self._tokenizer.vocab_size), "tokens")

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each bad word, at the start of a text and after a space.

        Raises:
            InvalidRequest: a word has tokens that the model lacks.
        """
        spelled = (spelled for word in words for spelled in (word.lstrip(), " " + word.lstrip()))
        encoded = (tuple(self._tokenizer.encode(one, add_special_tokens=False)) for one in spelled)
        found = tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))
        for token_ids in found:
            check_ids(token_ids, self.vocab_size, "bad_words")
        return found

    def _cut(self, token_ids: list[int], count: int, num_output_tokens: int) -> list[int]:
        """Return the last `count` tokens; -1: as many as leave room for `num_output_tokens`."""
        if count < 0:
            count = max(1, self.max_model_len - num_output_tokens)
        return token_ids[-count:]

    def _encode(
        self, text: str, attempt: Attempt, param: str, is_cut: bool = False, *, adds_special_tokens: bool = True
    ) -> list[int]:
        # A text that cannot fit even if it were all of the longest tokens is not worth encoding. The first comparison
        # spares almost every request the second, which looks through the vocabulary once.
        if self._cannot_fit(len(text), is_cut):
            raise self._too_long(f"{len(text)} characters", param, is_cut)
        attempt.begin_encoding(len(text))
        token_ids = self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        # A text that spells the first token itself has it once, not twice.
        begins_twice = adds_special_tokens and token_ids[:2] == [self._tokenizer.added_first] * 2
        return token_ids[1:] if begins_twice else token_ids

    def _gap(self, message: GenerateText, infill: Infill, attempt: Attempt) -> list[int]:
        """Return the tokens of a text with a gap, behind the tokenizer's first."""
        if message.truncate_prompt_tokens is not None:
            raise InvalidRequest("a prompt with a suffix cannot be cut", "truncate_prompt_tokens")
        num_characters = infill.num_characters()
        if self._cannot_fit(num_characters, is_cut=False):
            raise self._too_long(f"{num_characters} characters", "prompt")
        attempt.begin_encoding(num_characters)
        token_ids = self._infill.encode(infill, lambda text: self._tokenizer.encode(text, add_special_tokens=False))
        first = self._tokenizer.added_first
        return token_ids if first is None or message.add_special_tokens is False else [first, *token_ids]

    def _cannot_fit(self, num_characters: int, is_cut: bool) -> bool:
        room = self.max_model_len * (_MOST_TO_CUT if is_cut else 1)
        return 0 < 8 * room < num_characters and num_characters > self._tokenizer.longest_token * room

    def _chat(
        self, message: GenerateText | EncodeText, attempt: Attempt, is_cut: bool, adds_special_tokens: bool
    ) -> tuple[list[int], list[MediaInput]]:
        """Return the tokens of a chat, and its media. Special tokens are rarely added: templates spell them out."""
        if self._media is None:
            text = self._render(message, attempt, is_cut)
            return self._encode(text, attempt, "messages", is_cut, adds_special_tokens=adds_special_tokens), []
        assert message.messages is not None, "only chats have media"
        bare, items = self._media.take_media(message.messages)
        (bare, tools), mark = self._media.hide([bare, message.tools])
        text = self._render(msgspec.structs.replace(message, messages=bare, tools=tools), attempt, is_cut)
        attempt.begin_encoding(len(text))
        token_ids, first = self._media.encode(text, mark, items), self._tokenizer.added_first
        if adds_special_tokens and first is not None and token_ids[:1] != [first]:
            token_ids.insert(0, first)
        return self._media.place(token_ids, items)

    def _render(self, message: GenerateText | EncodeText, attempt: Attempt, is_cut: bool) -> str:
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions or serve with --chat-template")
        assert message.messages is not None, "only chats are rendered"
        if self._media is None and any(isinstance(one.get("content"), list) for one in message.messages):
            raise InvalidRequest("this model takes text only: no images, no videos and no sound", "messages")
        # A template takes longer than this look at what it will be given, and long chats are as quickly sent as texts.
        num_bytes = len(msgspec.json.encode((message.messages, message.tools)))
        if self._cannot_fit(num_bytes // _MOST_BYTES, is_cut):
            raise self._too_long(f"{num_bytes} bytes", "messages", is_cut)
        kwargs = self._chat_template.with_effort(message.template_kwargs)
        continues = bool(kwargs.get("continue_final_message", False))
        return self._chat_template.render(
            message.messages,
            tools=message.tools,
            add_generation_prompt=bool(kwargs.get("add_generation_prompt", not continues)),
            continue_final_message=continues,
            template_kwargs=kwargs,
            budget=attempt.begin_rendering(num_bytes),
        )

    def _too_long(self, size: str, param: str, is_cut: bool = False, needs_output: bool = True) -> PromptTooLong:
        if is_cut:
            most = f"{_MOST_TO_CUT} times this model's context of {self.max_model_len} tokens"
            return PromptTooLong(f"Your {param} of {size} cannot be encoded: at most {most} are.", param)
        effect = ", which leaves no room for output" if needs_output else ""
        return PromptTooLong(
            f"This model's maximum context length is {self.max_model_len} tokens. However, your {param} resulted in "
            f"{size}{effect}. Please reduce the length of the {param}.",
            param,
        )


def check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside a vocabulary.

    Raises:
        InvalidRequest: naming `param` and the id.
    """
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{param}: token id {token_id} is outside the vocabulary of {vocab_size}", param)
