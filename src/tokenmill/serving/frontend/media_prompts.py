"""Put images and sound into the prompts of chats: parts taken out of messages, placeholders put into the tokens.

Text never spells a placeholder: where a client has typed one, its characters are encoded one part after the other.
Does not know any modality: each brings a `MediaReader`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import MediaInput

T = TypeVar("T")
# To decode all media of a request.
MOST_SECONDS = 30.0


class MediaReader(Protocol[T]):
    """Reads the media of one model's chats; an item is what it takes from a part.

    Attributes:
        nouns: what it reads, for errors: "images".
        everything: all of it, for errors: "every image and video".
        placeholders: the tokens that stand for embeddings.
    """

    nouns: str
    everything: str
    placeholders: tuple[int, ...]

    def take(self, part: dict[str, Any]) -> tuple[dict[str, Any], T]:
        """Return what a template is shown of a part, and its item.

        Raises:
            InvalidRequest: the model does not take such a part.
        """
        ...

    def check(self, items: Sequence[T]) -> None:
        """Refuse more items than a request may have.

        Raises:
            InvalidRequest: saying how many, and the flag.
        """
        ...

    def shown(self, text: str, items: Sequence[T]) -> str:
        """Return a rendered chat with a placeholder for each span of each item.

        Raises:
            InvalidRequest: the template has left one out.
        """
        ...

    def pads(self, item: T) -> list[int]:
        """Return the placeholder of each of its spans."""
        ...

    def inputs(self, item: T, check_time: Callable[[], None]) -> Iterator[MediaInput]:
        """Decode an item; its spans begin at 0. `check_time` is called before each file.

        Raises:
            InvalidRequest: it cannot be decoded.
        """
        ...

    def close(self) -> None:
        """End the process that decodes."""
        ...


class MediaPrompts:
    """Makes prompts of chats with media, for one model.

    Args:
        encode: text -> token ids, special tokens among them.
        special_tokens: those which clients must not spell, as text.
        is_required: a prompt begins with one item, and has no other.
    """

    def __init__(
        self,
        reader: MediaReader[Any],
        encode: Callable[[str], list[int]],
        special_tokens: Sequence[str],
        is_required: bool = False,
    ) -> None:
        self._reader = reader
        self._is_required = is_required
        self._encode = encode
        self._special_tokens = list(special_tokens)

    @property
    def nouns(self) -> str:
        """Name the media, for errors."""
        return self._reader.nouns

    def check(self, media: Sequence[MediaInput], param: str) -> None:
        """Refuse a prompt that does not begin with its only item, where the model knows no others.

        Raises:
            InvalidRequest: saying what the model is for.
        """
        if self._is_required and [one.span.offset for one in media] != [0]:
            sentence = "this model writes down sound: its prompts begin with one clip (POST /v1/audio/transcriptions)"
            raise InvalidRequest(sentence, param)

    def take_media(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return messages with a bare part for each image or clip, and the items that these show, in order.

        Raises:
            InvalidRequest: there are more than a request may have, or of a kind that the model does not take.
        """
        items: list[Any] = []
        bare = [{**message, "content": self._bare(message.get("content"), items)} for message in messages]
        self._reader.check(items)
        return bare, items

    def hide(self, value: Any) -> tuple[Any, str]:
        """Return messages or tools with typed special tokens replaced, and the mark by which `encode` finds them."""
        mark = secrets.token_hex(12)
        return self._hidden(value, mark), mark

    def encode(self, text: str, mark: str, items: Sequence[Any]) -> list[int]:
        """Return the tokens of a rendered chat: special where the template has put them, plain where a client has.

        Raises:
            InvalidRequest: the template has not shown each item once.
        """
        pieces = re.split(f"{mark}:([0-9]):", self._reader.shown(text, items))
        token_ids = self._encode(pieces[0])
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            typed = self._special_tokens[int(number)]
            token_ids += self._encode(typed[:2]) + self._encode(typed[2:]) + self._encode(piece)
        return token_ids

    def place(self, token_ids: list[int], items: Sequence[Any]) -> tuple[list[int], list[MediaInput]]:
        """Decode what a chat shows, and give each span as many placeholders as it needs.

        Raises:
            InvalidRequest: an item cannot be decoded, or the template has not shown each once.
        """
        pads = self._reader.placeholders
        expected = [token_id for item in items for token_id in self._reader.pads(item)]
        if [token_id for token_id in token_ids if token_id in pads] != expected:
            raise InvalidRequest(f"the chat template does not show {self._reader.everything} once", "messages")
        placed: list[int] = []
        media: list[MediaInput] = []
        start = 0
        for one in self._inputs(items):
            place = token_ids.index(one.span.token_id, start)
            placed += token_ids[start:place]
            media.append(MediaInput(one.span._replace(offset=len(placed)), one.content))
            placed += [one.span.token_id] * one.span.length
            start = place + 1
        return placed + token_ids[start:], media

    def close(self) -> None:
        """End the process that decodes."""
        self._reader.close()

    def _inputs(self, items: Sequence[Any]) -> Iterator[MediaInput]:
        deadline = time.monotonic() + MOST_SECONDS

        def check_time() -> None:
            if time.monotonic() > deadline:
                what = f"to decode the {self._reader.nouns} of this request"
                raise InvalidRequest(f"{what} takes over {MOST_SECONDS:g} s", "messages")

        for item in items:
            yield from self._reader.inputs(item, check_time)

    def _bare(self, content: Any, items: list[Any]) -> Any:
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            if part["type"] == "text":
                parts.append(part)
                continue
            bare, item = self._reader.take(part)
            items.append(item)
            parts.append(bare)
        return parts

    def _hidden(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            for number, typed in enumerate(self._special_tokens):
                value = value.replace(typed, f"{mark}:{number}:")
            return value
        if isinstance(value, dict):
            return {self._hidden(key, mark): self._hidden(item, mark) for key, item in value.items()}
        return [self._hidden(item, mark) for item in value] if isinstance(value, list) else value


def has_media(messages: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return True if a chat has parts that are not text."""
    contents = (message.get("content") for message in messages or ())
    return any(part.get("type") != "text" for parts in contents if isinstance(parts, list) for part in parts)
