"""Define `ChatTokenizer`, a model's tokenizer and chat template under the names that transformers has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.frontend.chat_template import ChatTemplate
from tokenmill.serving.frontend.tokenizer import Tokenizer


class ChatTokenizer:
    """A tokenizer with a chat template, made by `LLM.get_tokenizer()`.

    Attributes:
        chat_template: the template's text; None: the model has none.
        eos_token, eos_token_id: the tokenizer's own; a model may end its texts with other tokens, too.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.chat_template = None if template is None else template.source
        self.bos_token, self.eos_token = tokenizer.bos_token, tokenizer.eos_token
        self.bos_token_id = tokenizer.token_id(self.bos_token or "")
        self.eos_token_id = tokenizer.token_id(self.eos_token or "")

    def __len__(self) -> int:
        """Return the number of ids, with added tokens."""
        return self._tokenizer.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Any], tools: Any = None, *, tokenize: bool = True, **options: Any
    ) -> Any:
        """Return a conversation's prompt as ids, or as text without `tokenize`; for a list of them, a list.

        Args:
            options: `add_generation_prompt` and `continue_final_message`, off by default; variables of the template.

        Raises:
            InvalidRequest: the model has no template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template")
        if conversation and isinstance(conversation[0], list):
            return [self.apply_chat_template(one, tools, tokenize=tokenize, **options) for one in conversation]
        form = {name: options.pop(name, False) for name in ("add_generation_prompt", "continue_final_message")}
        text = self._template.render(list(conversation), tools=tools, template_kwargs=options, **form)
        return self.encode(text, add_special_tokens=False) if tokenize else text
