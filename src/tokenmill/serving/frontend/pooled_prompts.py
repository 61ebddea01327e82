"""Turn the texts of one call into token ids, all at once: plain ones, pairs in a template, and pairs that are joined.

A text is encoded alone and what the tokenizer puts around it is added afterwards, so that a cut takes text only.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import msgspec
import tokenizers

from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidRequest, PromptTooLong
from tokenmill.core.json_text import whole_characters
from tokenmill.core.pooling import Cut, PooledTexts, PoolInput
from tokenmill.model.pooling.pair_template import fill_template
from tokenmill.serving.frontend.tokenizer import Tokenizer

# Characters of a text that a token may stand for, at most, before it is looked for in the vocabulary.
_MANY = 8
# How often a text is made shorter until its template fits.
_TRIES = 8
# What is looked for in the encoding of a text, to know what the tokenizer puts around it.
_SAMPLE = "a"


class PooledPrompt(msgspec.Struct, frozen=True):
    """The token ids of a text or a pair; `first`, `second`: see `PoolingParams`."""

    token_ids: list[int]
    first: int = 0
    second: int = 0


class PooledPrompts:
    """Encodes the texts of calls.

    Attributes:
        max_model_len: most tokens of a prompt. vocab_size: ids must be below it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cut = Cut.OFF
        self._tells_by_type = False
        # Long calls are prepared in threads, and the library's limit is a state.
        self._joining = threading.Lock()
        self.max_model_len = 0
        self.vocab_size = tokenizer.vocab_size

    def engine_ready(self, ready: EngineReady) -> None:
        """Take in the limits of the engine."""
        self.max_model_len, self.vocab_size = ready.max_model_len, ready.vocab_size
        self._cut = Cut(ready.truncate_inputs)
        self._tells_by_type = ready.pooling is not None and ready.pooling.tells_by_type

    def encode(self, texts: PooledTexts) -> list[PooledPrompt]:
        """Return the prompts of all texts, in their order.

        Raises:
            InvalidRequest: a text is empty, too long or outside the vocabulary; says which.
        """
        if texts.cut is None:
            texts = msgspec.structs.replace(texts, cut=self._cut)
        limit = min(texts.limit or self.max_model_len, self.max_model_len) or self.max_model_len
        for number, one in enumerate(texts.inputs):
            self._check_length(one, number, texts, limit)
        if any(one.second is not None for one in texts.inputs):
            found = self._pairs(texts, limit) if texts.template else self._joined(texts, limit)
        else:
            found = self._plain(texts, limit)
        for number, prompt in enumerate(found):
            self._check(prompt.token_ids, number, texts, limit)
        return found

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Token ids before and behind every text."""
        bare = self._tokenizer.encode(_SAMPLE, add_special_tokens=False)
        whole, size = self._tokenizer.encode(_SAMPLE), len(bare)
        starts = [at for at in range(len(whole) - size + 1) if whole[at : at + size] == bare]
        if not starts:
            return [], []
        before, after = whole[: starts[0]], whole[starts[0] + size :]
        end = self._tokenizer.added_end
        return before, after if end is None or after[-1:] == [end] else [*after, end]

    def _plain(self, texts: PooledTexts, limit: int) -> list[PooledPrompt]:
        """Encode texts that stand alone, behind the call's prefix."""
        written = [one for one in texts.inputs if one.token_ids is None]
        encoded = iter(self._encoded([texts.prefix + one.text for one in written], texts))
        before, after = self._around if texts.adds_special_tokens else ([], [])
        first = 0
        if texts.prefix and not texts.includes_prefix:
            first = len(before) + len(self._encoded([texts.prefix], texts)[0])
        prompts = []
        for one in texts.inputs:
            if one.token_ids is not None:
                prompts.append(PooledPrompt(_cut(one.token_ids, limit, texts.cut)))
                continue
            ids = next(encoded)
            # A text that spells these tokens itself has them once, not twice.
            ids = ids[len(before) :] if before and ids[: len(before)] == before else ids
            ids = ids[: -len(after)] if after and ids[-len(after) :] == after else ids
            ids = _cut(ids, max(1, limit - len(before) - len(after)), texts.cut)
            whole = [*before, *ids, *after]
            prompts.append(PooledPrompt(whole, min(first, len(whole) - 1)))
        return prompts

    def _pairs(self, texts: PooledTexts, limit: int) -> list[PooledPrompt]:
        """Encode pairs in the template of a decoder. What is too long is taken from the documents, then the query."""
        rendered = [self._fill(texts, one.text, one.second or "") for one in texts.inputs]
        encoded = self._encode_batch(rendered)
        if texts.cut is not Cut.OFF:
            for number, ids in enumerate(encoded):
                if len(ids) > limit:
                    encoded[number] = self._shortened(texts, texts.inputs[number], limit)
        return [PooledPrompt(ids) for ids in encoded]

    def _shortened(self, texts: PooledTexts, one: PoolInput, limit: int) -> list[int]:
        """Return a pair's ids with as much of its document as fits, and of its query if there is no room for any."""
        query, document = one.text, one.second or ""
        found = self._fitting(document, lambda part: self._fill(texts, query, part), texts, limit)
        if len(found) > limit:
            found = self._fitting(query, lambda part: self._fill(texts, part, ""), texts, limit)
        return found

    def _fitting(self, text: str, fill: Callable[[str], str], texts: PooledTexts, limit: int) -> list[int]:
        """Return the ids of a filled template with as much of a text as fits, perhaps none of it."""
        ids, (found,) = self._encode_batch([text])[0], self._encode_batch([fill("")])
        room = max(0, limit - len(found))
        for _ in range(_TRIES):
            if not room:
                break
            part = self._tokenizer.decode(_cut(ids, room, texts.cut), skip_special_tokens=False)
            (longer,) = self._encode_batch([fill(part)])
            if len(longer) <= limit:
                return longer
            # Tokens at the seams have come apart.
            room = max(0, room - (len(longer) - limit))
        return found

    def _fill(self, texts: PooledTexts, query: str, document: str) -> str:
        return fill_template(texts.template, query, document, texts.instruction)

    def _joined(self, texts: PooledTexts, limit: int) -> list[PooledPrompt]:
        """Encode pairs as the tokenizer joins them, cutting the longer text of each."""
        library = self._joiner
        pairs = [(_clean(one.text, texts), _clean(one.second or "", texts)) for one in texts.inputs]
        with self._joining:
            if texts.cut is None or texts.cut is Cut.OFF:
                library.no_truncation()
            else:
                library.enable_truncation(limit, strategy="longest_first", direction=texts.cut.value)
            try:
                found = library.encode_batch(pairs, add_special_tokens=texts.adds_special_tokens)
            except Exception as error:  # the library raises a bare Exception where special tokens alone are too many
                raise InvalidRequest(f"{texts.param}: {limit} tokens are too few for a pair", texts.param) from error
        if not self._tells_by_type:
            return [PooledPrompt(encoding.ids) for encoding in found]
        return [PooledPrompt(encoding.ids, second=_first_of_second(encoding.type_ids)) for encoding in found]

    @functools.cached_property
    def _joiner(self) -> tokenizers.Tokenizer:
        """The tokenizer of the library, which alone knows how the texts of a pair are joined."""
        path = self._tokenizer.path
        if not path.is_file():
            raise InvalidRequest("this model's tokenizer does not say how the texts of a pair are joined")
        library = tokenizers.Tokenizer.from_file(str(path))
        library.no_padding()
        return library

    def _encoded(self, written: Sequence[str], texts: PooledTexts) -> list[list[int]]:
        return self._encode_batch([_clean(one, texts) for one in written])

    def _encode_batch(self, written: Sequence[str]) -> list[list[int]]:
        return self._tokenizer.encode_batch([_whole(one) for one in written], add_special_tokens=False)

    def _check_length(self, one: PoolInput, number: int, texts: PooledTexts, limit: int) -> None:
        """Refuse, before it is encoded, a text that cannot fit even if it were all of the longest tokens."""
        num_characters = len(one.text) + len(one.second or "")
        room = limit if texts.cut is Cut.OFF else _MANY * limit
        if num_characters > _MANY * room and num_characters > self._tokenizer.longest_token * room:
            raise _too_long(f"{num_characters} characters", number, texts, limit)

    def _check(self, token_ids: Sequence[int], number: int, texts: PooledTexts, limit: int) -> None:
        if not token_ids:
            raise InvalidRequest(f"{texts.param}[{number}] is empty: at least one token is needed", texts.param)
        if len(token_ids) > limit:
            raise _too_long(f"{len(token_ids)} tokens", number, texts, limit)
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                sentence = f"token id {token_id} is outside the vocabulary of {self.vocab_size}"
                raise InvalidRequest(f"{texts.param}[{number}]: {sentence}", texts.param)


def _clean(text: str, texts: PooledTexts) -> str:
    text = _whole(text)
    return text.lower() if texts.lowers_case else text


def _whole(text: str) -> str:
    return text if text.isascii() else whole_characters(text)


def _cut(ids: list[int], count: int, cut: Cut | None) -> list[int]:
    if cut is Cut.OFF or len(ids) <= count:
        return ids
    return ids[-count:] if cut is Cut.LEFT else ids[:count]


def _first_of_second(type_ids: list[int]) -> int:
    """Return where the tokens of the second type begin; 0: there are none.

    Raises:
        InvalidRequest: the tokenizer's template mixes the types.
    """
    first = type_ids.index(1) if 1 in type_ids else len(type_ids)
    if any(type_ids[:first]) or any(kind != 1 for kind in type_ids[first:]):
        raise InvalidRequest("this model's tokenizer mixes the types of a pair's tokens, which is not supported")
    return first % len(type_ids) if type_ids else 0


def _too_long(size: str, number: int, texts: PooledTexts, limit: int) -> PromptTooLong:
    return PromptTooLong(
        f"{texts.param}[{number}] has {size}; the maximum context length is {limit} tokens: shorten it, or let "
        "it be cut (truncate_prompt_tokens -1, or --truncate-inputs right)",
        texts.param,
    )
