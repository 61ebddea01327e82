"""The vocabulary in a GGUF file's metadata: tokens with their kinds, what stands around a text, what ends one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.infill import SPELLINGS, Mark
from tokenmill.model.weights.gguf.pre_tokenizers import PreTokenizer, pre_tokenizer

PREFIX = "tokenizer.ggml."
MODELS = ("llama", "gpt2", "gemma4", "t5", "bert")


class Kind(IntEnum):
    """A kind of token, by llama.cpp's number."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Ids where a file has none, by llama.cpp's name of the vocabulary's model. Its end of a text for gpt2, 11 too, is left
# out: in most vocabularies that is a comma.
_IDS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama": {"bos": 1, "eos": 2, "unknown": 0},
        "gpt2": {"bos": 11},
        "gemma4": {},
        "t5": {"eos": 1, "unknown": 2, "padding": 0},
        "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    }
)
_NAMES = ("bos", "eos", "unknown", "seperator", "padding", "mask", "cls", "eot", "eom")
# What ends a text wherever a vocabulary has it.
ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend▁of▁sentence\uff5c>",
        "[e~[",
    ]
)
# Names of keys that say the ids of infilling; where none does, it is looked for the spellings.
_INFILLING: Mapping[Mark, Sequence[str]] = MappingProxyType(
    {
        Mark.PREFIX: ("fim_pre", "prefix"),
        Mark.SUFFIX: ("fim_suf", "suffix"),
        Mark.MIDDLE: ("fim_mid", "middle"),
        Mark.PAD: ("fim_pad",),
        Mark.REPOSITORY: ("fim_rep",),
        Mark.FILE: ("fim_sep",),
    }
)


class Vocabulary(msgspec.Struct, frozen=True):
    """The metadata that concern text and tokens.

    Attributes:
        model: one of `MODELS`.
        cut: how byte-level BPE cuts text; None: other models do not cut.
        tokens: by id, as the file spells them.
        kinds: of the tokens; those that end a text count as control.
        ids: of special tokens by llama.cpp's names (`bos`, `eos`, `unknown`, `seperator` ...).
        infilling: ids of tokens around prefix, suffix and middle.
        ends: ids that end a text.
        adds_bos, adds_eos: what stands around every text. adds_sep: of word pieces the same at the end; of others, what
            stands between the texts of a pair.
        has_space_prefix: a text begins as if after a space.
        strips_after: tokens that are cut out of the text take the white space after them (Phi-3).
    """

    model: str
    cut: PreTokenizer | None
    tokens: list[str]
    kinds: list[int]
    ids: Mapping[str, int]
    infilling: Mapping[str, int]
    ends: frozenset[int]
    adds_bos: bool
    adds_eos: bool
    adds_sep: bool
    has_space_prefix: bool
    strips_after: bool = False


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the vocabulary.

    Raises:
        InvalidCheckpoint: there is none, it is of a kind that is not supported, or its lists do not fit each other.
    """
    model = str(metadata.get(f"{PREFIX}model", "none"))
    if model not in MODELS:
        raise InvalidCheckpoint(
            f"the vocabulary is of the kind {model!r}, which is not supported ({', '.join(MODELS)} are); put the "
            "model's tokenizer.json beside the file"
        )
    tokens = list(metadata.get(f"{PREFIX}tokens", ()))
    kinds = list(metadata.get(f"{PREFIX}token_type", ())) or [int(Kind.NORMAL)] * len(tokens)
    if not tokens or len(kinds) != len(tokens):
        raise InvalidCheckpoint(f"the vocabulary has {len(tokens)} tokens and {len(kinds)} token types")
    cut = pre_tokenizer(_pre(metadata, model)) if model in ("gpt2", "gemma4") else None
    by_text = dict(zip(tokens, range(len(tokens)), strict=True))
    places = {token: by_text[token] for token in ENDS.union(*SPELLINGS.values()) & by_text.keys()}
    adds_bos = model == "gemma4" or _flag(
        metadata, "add_bos_token", model in ("llama", "bert") or bool(cut and cut.adds_bos)
    )
    ids = _ids(metadata, model, len(tokens))
    if model == "gpt2" and not adds_bos and f"{PREFIX}bos_token_id" not in metadata:
        ids.pop("bos", None)
    infilling = _infilling(metadata, places, len(tokens))
    ends = _ends(ids, infilling, places, kinds)
    for number in ends:
        kinds[number] = Kind.CONTROL
    return Vocabulary(
        model=model,
        cut=cut,
        tokens=tokens,
        kinds=kinds,
        ids=ids,
        infilling=infilling,
        ends=ends,
        adds_bos=adds_bos,
        adds_eos=_flag(metadata, "add_eos_token", model == "t5"),
        adds_sep=_flag(metadata, "add_sep_token", model == "bert" or bool(cut and cut.adds_sep)),
        has_space_prefix=_flag(metadata, "add_space_prefix", model in ("llama", "t5")),
        strips_after="phi-3" in (name := str(metadata.get("general.name", "")).lower()) or "phi3" in name,
    )


def _pre(metadata: Mapping[str, Any], model: str) -> str:
    return "gemma4" if model == "gemma4" else str(metadata.get(f"{PREFIX}pre") or "default")


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(metadata.get(f"{PREFIX}{name}", default))


def _ids(metadata: Mapping[str, Any], model: str, size: int) -> dict[str, int]:
    """Return the ids of special tokens; those outside the vocabulary are ignored."""
    found = {name: metadata.get(f"{PREFIX}{name}_token_id", _IDS[model].get(name)) for name in _NAMES}
    return {name: int(number) for name, number in found.items() if number is not None and 0 <= number < size}


def _infilling(metadata: Mapping[str, Any], places: Mapping[str, int], size: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for mark, keys in _INFILLING.items():
        said = [metadata[key] for key in (f"{PREFIX}{one}_token_id" for one in keys) if key in metadata]
        number = next(iter([*said, *(places[text] for text in SPELLINGS[mark] if text in places)]), None)
        if number is not None and 0 <= number < size:
            found[mark.value] = int(number)
    return found


def _ends(
    ids: Mapping[str, int], infilling: Mapping[str, int], places: Mapping[str, int], kinds: Sequence[int]
) -> frozenset[int]:
    """Return the ids that end a text: those of keys, and those with texts that end it in every model."""
    texts = {text for text in ENDS if text in places}
    calls, flushes = texts & {"<|call|>", "<|calls|>"}, "<|flush|>" in texts
    if calls and ("<|return|>" in texts or flushes):
        texts.discard("<|end|>")  # of gpt-oss and its kin: it ends a message, and others follow
    # Where another text ends it, this is markup that closes a tag, as in Gemma's and Qwen's vocabularies.
    if len(texts) > 1 and "</s>" in texts and kinds[places["</s>"]] != Kind.CONTROL:
        texts.discard("</s>")
    named = {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    fillers = {infilling[name] for name in ("pad", "repository", "separator") if name in infilling}
    return frozenset(named | fillers | {places[text] for text in texts})
