"""What a client sends as a prompt, brought to token ids and checked: nothing else reaches the engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.core.errors import InvalidRequest, PromptTooLong
from tokenmill.core.media import MediaInput
from tokenmill.core.messages import EncodeText, GenerateText
from tokenmill.frontend.attempt import Attempt
from tokenmill.frontend.chat_template import ChatTemplate
from tokenmill.frontend.tokenizer import Tokenizer
from tokenmill.vision.prompts import MediaPrompts

# Of a prompt that will be cut to fit, or is only to be counted, this many contexts are worth encoding.
_MOST_TO_CUT = 8
# A character has at most so many bytes in JSON as msgspec writes it, where most have one.
_MOST_BYTES = 6


class PromptEncoder:
    """Renders, encodes and checks prompts against the limits of the engine.

    Attributes:
        max_model_len: prompt and output tokens at most; 0 until the engine has told.
        vocab_size: the model's; ids must be below it.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, media: MediaPrompts | None = None
    ) -> None:
        """`media` is what makes prompts of chats with images; None: the model takes text only."""
        self._tokenizer = tokenizer
        self._media = media
        self._chat_template = chat_template
        self.max_model_len = 0
        self.vocab_size = tokenizer.vocab_size

    def prompt(self, message: GenerateText, attempt: Attempt) -> tuple[list[int], list[MediaInput]]:
        """The prompt of a request, and its images.

        Raises:
            InvalidRequest: it is empty, too long, outside the vocabulary, or the chat template refuses it.
            TakesLong: see `Attempt`, for `tokens` too.
        """
        param = "prompt" if message.messages is None else "messages"
        is_cut = message.truncate_prompt_tokens is not None
        media: list[MediaInput] = []
        if message.token_ids is not None:
            token_ids = message.token_ids
        elif message.messages is not None:
            # The template spells out every special token, so the tokenizer must not add its own.
            token_ids, media = self._chat(message, attempt, is_cut)
        else:
            token_ids = self._encode(message.text or "", attempt, param, is_cut)
        if not token_ids:
            raise InvalidRequest("the prompt is empty: at least one token is needed", param)
        self.check_ids(token_ids, param)
        if message.truncate_prompt_tokens is not None:
            if media:
                raise InvalidRequest("a prompt with images cannot be cut", "truncate_prompt_tokens")
            token_ids = self._cut(token_ids, message.truncate_prompt_tokens, message.params.max_tokens)
        if self.max_model_len and len(token_ids) >= self.max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens", param)
        return token_ids, media

    def tokens(self, message: EncodeText, attempt: Attempt) -> list[int]:
        """The tokens of a text or a chat, of up to some contexts.

        Raises:
            InvalidRequest: it is longer, or the chat template refuses the messages.
        """
        param = "prompt" if message.messages is None else "messages"
        if message.messages is not None and self._media is not None:
            return self._chat(message, attempt, is_cut=True)[0]
        text = (message.text or "") if message.messages is None else self._render(message, attempt, is_cut=True)
        return self._encode(text, attempt, param, is_cut=True, adds_special_tokens=message.add_special_tokens)

    def check_to_decode(self, token_ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary, and more of them than anybody can have had from here.

        Raises:
            InvalidRequest: saying which.
        """
        if self.max_model_len and len(token_ids) > _MOST_TO_CUT * self.max_model_len:
            sentence = f"tokens: {len(token_ids)} ids; at most {_MOST_TO_CUT * self.max_model_len} at once"
            raise InvalidRequest(sentence, "tokens")
        self.check_ids(token_ids, "tokens")

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids that no row of the embedding stands for.

        Raises:
            InvalidRequest: naming `param` and the id.
        """
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                sentence = f"{param}: token id {token_id} is outside the vocabulary of {self.vocab_size}"
                raise InvalidRequest(sentence, param)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of bad words, as they begin a text and as they follow a space."""
        spelled = (spelled for word in words for spelled in (word.lstrip(), " " + word.lstrip()))
        encoded = (tuple(self._tokenizer.encode(one, add_special_tokens=False)) for one in spelled)
        return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))

    def _cut(self, token_ids: list[int], count: int, max_tokens: int | None) -> list[int]:
        """The last `count` tokens; -1: as many as leave room for `max_tokens` of output."""
        if count < 0:
            count = max(1, self.max_model_len - (max_tokens or 1))
        return token_ids[-count:]

    def _encode(
        self, text: str, attempt: Attempt, param: str, is_cut: bool = False, *, adds_special_tokens: bool = True
    ) -> list[int]:
        # A text that cannot fit even if it were all of the longest tokens is not worth encoding. The first comparison
        # spares almost every request the second, which looks through the vocabulary once.
        if self._cannot_fit(len(text), is_cut):
            raise self._too_long(f"{len(text)} characters", param, is_cut)
        attempt.begin_encoding(len(text))
        return self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)

    def _cannot_fit(self, num_characters: int, is_cut: bool) -> bool:
        room = self.max_model_len * (_MOST_TO_CUT if is_cut else 1)
        return 0 < 8 * room < num_characters and num_characters > self._tokenizer.longest_token * room

    def _chat(
        self, message: GenerateText | EncodeText, attempt: Attempt, is_cut: bool
    ) -> tuple[list[int], list[MediaInput]]:
        """The tokens of a chat, and what it shows. The template spells out every special token, so none is added."""
        if self._media is None:
            text = self._render(message, attempt, is_cut)
            return self._encode(text, attempt, "messages", is_cut, adds_special_tokens=False), []
        assert message.messages is not None, "only chats have images"
        bare, items = self._media.take(message.messages)
        (bare, tools), mark = self._media.hide([bare, message.tools])
        text = self._render(msgspec.structs.replace(message, messages=bare, tools=tools), attempt, is_cut)
        attempt.begin_encoding(len(text))
        return self._media.place(self._media.encode(text, mark, items), items)

    def _render(self, message: GenerateText | EncodeText, attempt: Attempt, is_cut: bool) -> str:
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions or serve with --chat-template")
        assert message.messages is not None, "only chats are rendered"
        if self._media is None and any(isinstance(one.get("content"), list) for one in message.messages):
            raise InvalidRequest("this model takes no images and no videos", "messages")
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

    def _too_long(self, size: str, param: str, is_cut: bool = False) -> PromptTooLong:
        if is_cut:
            most = f"{_MOST_TO_CUT} times this model's context of {self.max_model_len} tokens"
            return PromptTooLong(f"Your {param} of {size} cannot be encoded: at most {most} are.", param)
        return PromptTooLong(
            f"This model's maximum context length is {self.max_model_len} tokens. However, your {param} resulted in "
            f"{size}, which leaves no room for output. Please reduce the length of the {param}.",
            param,
        )
