"""The tokenizer of a GGUF file's vocabulary, as tokenizer.json.

The algorithms are those of llama.cpp, built of the parts of the `tokenizers` library: byte-level BPE, SentencePiece's
BPE by scores, Unigram and WordPiece. Special tokens are cut out of the raw text first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.vocabulary.mapped_file import FLAGS, native_module
from tokenmill.model.vocabulary.recipe import NotCovered, finish_vocabulary
from tokenmill.model.weights.gguf.vocabulary import PREFIX, Kind, Vocabulary

if TYPE_CHECKING:
    from tokenmill._native import VocabularyBuilder

SPACE = "▁"
# llama.cpp knows no longest word; the library asks for one.
_LONGEST_WORD = 10_000
# Tokens of Phi-3 that are cut out of the text and leave the white space after them.
_KEEPING = ("<unk>", "<s>", "<|endoftext|>")


def build_tokenizer(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a vocabulary.

    Args:
        metadata: of which merges, scores and normalization are read.

    Raises:
        InvalidCheckpoint: these are missing or do not fit the vocabulary.
    """
    build = {"llama": _sentence_pieces, "t5": _unigram, "bert": _word_pieces}.get(vocabulary.model, _merged_pairs)
    try:
        tokenizer = build(vocabulary, metadata)
        tokenizer.add_tokens(_added_tokens(vocabulary))
        _surround(tokenizer, vocabulary)
    except InvalidCheckpoint:
        raise
    except Exception as error:  # the library raises a bare Exception for lists that do not fit each other
        raise InvalidCheckpoint(f"the vocabulary cannot be used: {error}") from error
    return tokenizer


def _merged_pairs(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return BPE by the file's merges, on bytes or (as Gemma 4) on text."""
    cut = vocabulary.cut
    assert cut is not None, "it was read with the vocabulary"
    places = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = [_pair(merge) for merge in metadata.get(f"{PREFIX}merges", ())]
    tokenizer = Tokenizer(models.BPE(places, merges, ignore_merges=cut.ignore_merges, byte_fallback=cut.is_raw))
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.cuts]
    if cut.is_raw:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.decoder = _text_decoder(has_prefix=False)
    else:
        if cut.composes:
            tokenizer.normalizer = normalizers.NFC()
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """Cut a merge at its first space; one at its very start belongs to the left token."""
    at = merge.find(" ", 1)
    if at < 0:
        raise InvalidCheckpoint(f"the merge {merge!r} has no space between two tokens")
    return merge[:at], merge[at + 1 :]


def _sentence_pieces(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return BPE that joins the pair whose joint text has the highest score."""
    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    scores = _scores(vocabulary, metadata)
    places = {token: number for number, token in enumerate(tokens)}
    normal = {token: number for token, number in places.items() if kinds[number] == Kind.NORMAL}
    merges = [
        (-scores[number], left, right)
        for token, number in normal.items()
        for at in range(1, len(token))
        if (left := normal.get(token[:at])) is not None and (right := normal.get(token[at:])) is not None
    ]
    merges.sort()
    pairs = [(tokens[left], tokens[right]) for _, left, right in merges]
    unknown = vocabulary.ids.get("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            places,
            pairs,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    _set_spaces(tokenizer, vocabulary.has_space_prefix)
    return tokenizer


def piece_files(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> tuple[bytes, bytes] | None:
    """Return SentencePiece's BPE as tokenizer.json, and as a mapped vocabulary; None: `build_tokenizer` makes it.

    The same as the library's, in a tenth of its time: tokens and merges are found and written natively.
    """
    native = native_module()
    if vocabulary.model != "llama" or native is None:
        return None
    unknown = vocabulary.ids.get("unknown")
    frame = Tokenizer(
        models.BPE(byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else vocabulary.tokens[unknown])
    )
    _set_spaces(frame, vocabulary.has_space_prefix)
    _surround(frame, vocabulary)
    try:
        builder: VocabularyBuilder = native.VocabularyBuilder()
        builder.add_tokens(vocabulary.tokens)
        scores = np.array(_scores(vocabulary, metadata), np.float64)
        marks = (np.array(vocabulary.kinds) == Kind.NORMAL).astype(np.uint8)
        builder.add_scored_merges(scores.ctypes.data, marks.ctypes.data)
        content = msgspec.json.decode(frame.to_str())
        content["added_tokens"] = _added_entries(vocabulary)
        bare = msgspec.json.encode(content)
        content["model"] |= {
            "vocab": msgspec.Raw(builder.tokens_json()),
            "merges": msgspec.Raw(builder.merges_json()),
        }
        return msgspec.json.encode(content), finish_vocabulary(bare, builder)
    except (ValueError, NotCovered):  # of a vocabulary that the library forgives
        return None


def _added_entries(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the tokens that are cut out of the text before it is encoded, as tokenizer.json has them."""
    kinds, special = np.array(vocabulary.kinds), (Kind.CONTROL, Kind.UNKNOWN)
    added = np.flatnonzero(np.isin(kinds, (*special, Kind.USER_DEFINED))).tolist()
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": vocabulary.strips_after and token not in _KEEPING,
            "normalized": False,
            "special": is_special,
        }
        for number in added
        if (token := vocabulary.tokens[number])
        for is_special in [vocabulary.kinds[number] in special]
    ]


def _set_spaces(tokenizer: Tokenizer, has_prefix: bool) -> None:
    """Have spaces written as marks, with one before a text if it begins as if after a space."""
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    tokenizer.decoder = _text_decoder(has_prefix)


def _text_decoder(has_prefix: bool) -> Any:
    stages = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if has_prefix else stages)


def _unigram(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the pieces with the highest sum of scores; those that users defined cost nothing."""
    free = {number for number, kind in enumerate(vocabulary.kinds) if kind == Kind.USER_DEFINED}
    scores = [0.0 if number in free else score for number, score in enumerate(_scores(vocabulary, metadata))]
    pieces = list(zip(vocabulary.tokens, scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, vocabulary.ids.get("unknown")))
    steps: list[Any] = []
    charsmap = metadata.get(f"{PREFIX}precompiled_charsmap")
    if charsmap:
        steps.append(normalizers.Precompiled(bytes(number & 255 for number in charsmap)))
    if metadata.get(f"{PREFIX}remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.has_space_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    scheme = "always" if vocabulary.has_space_prefix else "never"
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return tokenizer


def _word_pieces(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the longest pieces of words; the file marks where words begin, and the library where they go on."""
    places = {
        token if kind != Kind.NORMAL else token[1:] if token.startswith(SPACE) else f"##{token}": number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    }
    unknown = vocabulary.tokens[vocabulary.ids["unknown"]]
    lowercases = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    strips = bool(metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercases))
    tokenizer = Tokenizer(models.WordPiece(places, unk_token=unknown, max_input_chars_per_word=_LONGEST_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercases, strip_accents=strips)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def _scores(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Sequence[float]:
    scores: Sequence[float] = metadata.get(f"{PREFIX}scores") or [0.0] * len(vocabulary.tokens)
    if len(scores) != len(vocabulary.tokens):
        raise InvalidCheckpoint(f"the vocabulary has {len(vocabulary.tokens)} tokens and {len(scores)} scores")
    return scores


def _added_tokens(vocabulary: Vocabulary) -> list[AddedToken]:
    """Return the same as the library's objects."""
    entries = _added_entries(vocabulary)
    return [AddedToken(entry["content"], **{name: entry[name] for name in FLAGS}) for entry in entries]


def _surround(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Set the tokens that stand around every text, and between the texts of a pair.

    Of word pieces the separator ends each text; of others it stands between two, behind the end of the first.
    """
    ends_by_separator = vocabulary.model == "bert" and "seperator" in vocabulary.ids
    ends = vocabulary.adds_eos or (vocabulary.model == "bert" and vocabulary.adds_sep)
    before = _known(vocabulary, "bos" if vocabulary.adds_bos else "")
    after = _known(vocabulary, "" if not ends else "seperator" if ends_by_separator else "eos")
    between = _known(vocabulary, "seperator" if vocabulary.adds_sep and vocabulary.model != "bert" else "")
    names = (*before, *after, *between)
    if not names:
        return
    # A dollar sign would begin a variable of the library's template: tokens are named by their roles.
    roles = {name: f"[{name}]" for name in names}
    tokens = [
        {"id": role, "ids": [vocabulary.ids[name]], "tokens": [vocabulary.tokens[vocabulary.ids[name]]]}
        for name, role in roles.items()
    ]
    begin, end, seam = ([roles[name] for name in part] for part in (before, after, between))
    single = [*begin, "$A", *end]
    pair = [*single, *seam, *(f"{part}:1" for part in ("$B", *end))]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _known(vocabulary: Vocabulary, name: str) -> list[str]:
    """Return the special token of a name as a list; empty where the vocabulary has none."""
    return [name] if name in vocabulary.ids else []
