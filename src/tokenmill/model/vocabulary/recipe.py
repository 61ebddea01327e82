"""Turn a tokenizer.json into a mapped vocabulary, and a recipe of how the library cuts text before it is looked up.

The library keeps its own parts (added tokens, normalizer, pre-tokenizer) in tokenizers without a vocabulary, whose one
word stands for any piece of text. Only the model, byte-pair encoding, is ours. Whatever is not covered is refused by
`NotCovered`; the library serves it as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

if TYPE_CHECKING:
    from tokenmill._native import VocabularyBuilder

JsonObject = dict[str, Any]

IN_MODEL, IS_ADDED, IS_SPECIAL = 1, 2, 4
_BYTE_FALLBACK, _FUSES_UNKNOWN, _IGNORES_MERGES = 1, 2, 4
_NO_TOKEN = 0xFFFFFFFF
_MARK = "\u2581"
# Parts of the library that cut text and change nothing in it.
_CUTS = frozenset(
    {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "BertPreTokenizer"}
)
# Normal forms: each part of a text that is in one is in it, too.
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class NotCovered(Exception):
    """The tokenizer has a part that only the library knows."""


class Spelling(IntEnum):
    """Spellings of text in a vocabulary: as it is, in GPT-2's letters for bytes, or with marks for spaces."""

    PLAIN = 0
    BYTES = 1
    MARKS = 2


class Prefix(IntEnum):
    """Rules for a mark at the start of pieces."""

    NONE = 0
    ALWAYS = 1
    UNLESS_THERE = 2
    AT_START = 3


class Recipe(msgspec.Struct, frozen=True):
    """The notes in a mapped vocabulary.

    Attributes:
        added: entries of added tokens as tokenizer.json has them, with their true ids.
        cuts: the pre-tokenizers that cut text.
        normalizer: changes text before it is cut; None: nothing does, or the spelling's marks are all there is to do.
        is_form: text that it leaves as it is can be cut together with its added tokens.
        adds_space: a piece of text between added tokens begins with a space.
        before, after: ids around every text.
        decoder: the entry of tokenizer.json.
    """

    added: list[JsonObject]
    cuts: list[JsonObject]
    normalizer: JsonObject | None
    is_form: bool
    adds_space: bool
    spelling: Spelling
    prefix: Prefix
    is_split: bool
    before: list[int]
    after: list[int]
    decoder: JsonObject | None

    @property
    def is_byte_level(self) -> bool:
        """True if tokens are spelled in GPT-2's characters for bytes, as their decoder reads them."""
        return any(step["type"] == "ByteLevel" for step in _steps(self.decoder, "decoders"))

    def without_prefix(self) -> Recipe:
        """Return the recipe for text that may be the middle of one."""
        return msgspec.structs.replace(self, prefix=Prefix.NONE, adds_space=False)


class _Model(msgspec.Struct):
    """The model's entry; vocabulary and merges are parsed natively."""

    type: str
    vocab: msgspec.Raw
    merges: msgspec.Raw
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool | None = False
    byte_fallback: bool | None = False
    ignore_merges: bool | None = False


class _File(msgspec.Struct):
    """The entries of a tokenizer.json."""

    model: _Model
    added_tokens: list[JsonObject] = []
    normalizer: JsonObject | None = None
    pre_tokenizer: JsonObject | None = None
    post_processor: JsonObject | None = None
    decoder: JsonObject | None = None


def build_vocabulary(raw: bytes, missing: Sequence[JsonObject], native: Any) -> bytes:
    """Return the content of the mapped file of a tokenizer.json.

    Args:
        missing: entries of added tokens that the file may lack: they are added if they get the ids that they name.
        native: the module `tokenmill._native`.

    Raises:
        NotCovered: the tokenizer has parts that only the library knows, or is broken.
    """
    try:
        file = msgspec.json.decode(raw, type=_File)
        builder: VocabularyBuilder = native.VocabularyBuilder()
        builder.read_tokens(bytes(file.model.vocab))
        builder.read_merges(bytes(file.model.merges))
        return _finished(file, builder, missing)
    except (ValueError, KeyError, TypeError) as error:
        raise NotCovered(str(error)) from error


def finish_vocabulary(frame: bytes, builder: VocabularyBuilder) -> bytes:
    """Return the content of the mapped file of a builder's tokens and merges.

    Args:
        frame: a tokenizer.json, whose own tokens and merges are not read.

    Raises:
        NotCovered: see `build_vocabulary`.
    """
    try:
        return _finished(msgspec.json.decode(frame, type=_File), builder, ())
    except (ValueError, KeyError, TypeError) as error:
        raise NotCovered(str(error)) from error


def _finished(file: _File, builder: VocabularyBuilder, missing: Sequence[JsonObject]) -> bytes:
    options, unknown = _options(file.model, builder)
    added = _add_tokens(file.added_tokens, missing, builder)
    recipe = _recipe(file, added)
    return builder.finish(options, unknown, msgspec.json.encode(recipe))


def _options(model: _Model, builder: VocabularyBuilder) -> tuple[int, int]:
    """Return the model's options, and the id of what is unknown."""
    if model.type != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        raise NotCovered("the model is not byte-pair encoding, or one with a dropout or marks of words")
    unknown = _NO_TOKEN
    if model.unk_token is not None:
        found = builder.find(model.unk_token)
        if found is None:
            raise NotCovered("the unknown token is not in the vocabulary")
        unknown = found
    options = _BYTE_FALLBACK * bool(model.byte_fallback) + _FUSES_UNKNOWN * bool(model.fuse_unk)
    return options + _IGNORES_MERGES * bool(model.ignore_merges), unknown


def _add_tokens(
    entries: Sequence[JsonObject], missing: Sequence[JsonObject], builder: VocabularyBuilder
) -> list[JsonObject]:
    """Add tokens in the library's order and with its ids; return them with these."""
    size = builder.num_tokens
    added: list[JsonObject] = []
    seen: set[str] = set()

    def add(entry: JsonObject) -> None:
        content = entry["content"]
        if not content or content in seen:
            raise NotCovered(f"the added token {content!r} is empty or there twice")
        seen.add(content)
        number = builder.find(content)
        if number is None:
            highest = max((one["id"] for one in added), default=-1)
            number = highest + 1 if added and (highest >= size or size == 0) else size
        builder.add(number, content, IS_ADDED | (IS_SPECIAL if entry.get("special") else 0))
        added.append({**entry, "id": number})

    for entry in entries:
        add(entry)
    for entry in missing:
        if builder.find(entry["content"]) is None and builder.num_tokens == entry["id"]:
            add(entry)
    return added


def _recipe(file: _File, added: list[JsonObject]) -> Recipe:
    steps = _steps(file.pre_tokenizer, "pretokenizers")
    changes = _steps(file.normalizer, "normalizers")
    normalizer, cuts, adds_space, is_split = file.normalizer, steps, False, False
    spelling, prefix = Spelling.PLAIN, Prefix.NONE
    if steps and steps[-1]["type"] == "ByteLevel":
        spelling, last = Spelling.BYTES, steps[-1]
        cuts = [*steps[:-1], *([_split(_WORDS)] if last.get("use_regex", True) else [])]
        adds_space = bool(last.get("add_prefix_space", True))
        if adds_space and (len(steps) > 1 or changes):
            raise NotCovered("a space is added to pieces that were cut or changed before")
    elif len(steps) == 1 and steps[0]["type"] == "Metaspace" and not changes:
        spelling, cuts = Spelling.MARKS, []
        prefix, is_split = _metaspace(steps[0])
    elif _only_marks(changes) and _cuts_no_marks(steps) and not any(one.get("normalized") for one in added):
        spelling, cuts, normalizer = Spelling.MARKS, [], None
        prefix = Prefix.ALWAYS if any(one["type"] == "Prepend" for one in changes) else Prefix.NONE
    if others := {one["type"] for one in cuts} - _CUTS:
        raise NotCovered(f"pieces are cut by {', '.join(sorted(others))}")
    if normalizer is not None and any(_is_changed(one, normalizer) for one in added if one.get("normalized")):
        raise NotCovered("an added token is spelled in another way where it is looked for")
    before, after = _around(file.post_processor)
    return Recipe(
        added=added,
        cuts=cuts,
        normalizer=normalizer,
        is_form=bool(changes) and {one["type"] for one in changes} <= _FORMS,
        adds_space=adds_space,
        spelling=spelling,
        prefix=prefix,
        is_split=is_split,
        before=before,
        after=after,
        decoder=file.decoder,
    )


def _steps(entry: JsonObject | None, name: str) -> list[JsonObject]:
    """Return the parts of a sequence, or the one part, of which there may be none."""
    if entry is None:
        return []
    if entry["type"] != "Sequence":
        return [entry]
    return [step for part in entry[name] for step in _steps(part, name)]


def _split(pattern: str) -> JsonObject:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _metaspace(step: JsonObject) -> tuple[Prefix, bool]:
    if step.get("replacement", _MARK) != _MARK:
        raise NotCovered("spaces are marked by another character")
    scheme = step.get("prepend_scheme", "always")
    if step.get("add_prefix_space") is False:
        scheme = "never"
    kinds = {"always": Prefix.UNLESS_THERE, "first": Prefix.AT_START, "never": Prefix.NONE}
    return kinds[scheme], bool(step.get("split", True))


def _only_marks(changes: Sequence[JsonObject]) -> bool:
    """Return True if a normalizer replaces spaces by marks, perhaps puts one at the start, and does nothing else."""
    replaces = [one for one in changes if one["type"] == "Replace"]
    prepends = [one for one in changes if one["type"] == "Prepend"]
    if len(replaces) != 1 or len(prepends) > 1 or len(replaces) + len(prepends) != len(changes):
        return False
    is_mark = replaces[0]["pattern"] == {"String": " "} and replaces[0]["content"] == _MARK
    return is_mark and all(one["prepend"] == _MARK for one in prepends)


def _cuts_no_marks(steps: Sequence[JsonObject]) -> bool:
    """Return True if nothing is cut, or only at spaces, of which none are left."""
    return not steps or (len(steps) == 1 and steps[0]["type"] == "Split" and steps[0]["pattern"] == {"String": " "})


def _is_changed(entry: JsonObject, normalizer: JsonObject) -> bool:
    content: str = entry["content"]
    return bool(make_part("normalizer", normalizer).normalize_str(content) != content)


def _around(post_processor: JsonObject | None) -> tuple[list[int], list[int]]:
    """Return the ids that a post-processor puts before and after a text."""
    if post_processor is None:
        return [], []
    encoding = make_cutter([], [], post_processor).encode("a")
    masks, ids = encoding.special_tokens_mask, encoding.ids
    if masks.count(0) != 1:
        raise NotCovered("a text is surrounded in another way than by tokens before and after it")
    at = masks.index(0)
    return ids[:at], ids[at + 1 :]


def make_cutter(
    added: Sequence[JsonObject], cuts: Sequence[JsonObject], post_processor: JsonObject | None = None
) -> tokenizers.Tokenizer:
    """Return a tokenizer that gives 0 for every piece of text, and n for the added token n (from 1 on)."""
    names = {entry["content"] for entry in added}
    word = "piece"
    while word in names:
        word += "+"
    pre_tokenizer = {"type": "Sequence", "pretokenizers": list(cuts)} if cuts else None
    return _library(
        word,
        added_tokens=[{**entry, "id": number} for number, entry in enumerate(added, 1)],
        pre_tokenizer=pre_tokenizer,
        post_processor=post_processor,
    )


def make_part(name: str, entry: JsonObject) -> Any:
    """Return the normalizer or the decoder that an entry of tokenizer.json describes."""
    return getattr(_library("piece", **{name: entry}), name)


def _library(word: str, **parts: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer whose vocabulary is one word, which stands for all text."""
    model = {"type": "WordLevel", "vocab": {word: 0}, "unk_token": word}
    try:
        return tokenizers.Tokenizer.from_buffer(msgspec.json.encode({"version": "1.0", "model": model, **parts}))
    except Exception as error:  # the library raises a bare Exception for what it cannot parse
        raise NotCovered(str(error)) from error
