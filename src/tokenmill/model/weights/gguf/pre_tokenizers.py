"""Cut text as byte-level BPE does before merging, by llama.cpp's names (`tokenizer.ggml.pre`).

The expressions are those of the models' own tokenizer.json. Where llama.cpp simplifies them (letter case and combining
marks outside ASCII), the model's own is right, and ids are those of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec

from tokenmill.core.errors import InvalidCheckpoint


class PreTokenizer(msgspec.Struct, frozen=True):
    """A way to cut.

    Attributes:
        cuts: expressions; each cuts the pieces that the one before has left.
        ignore_merges: a piece that is a token stays whole, whatever the merges say.
        adds_bos: BOS comes first unless the file says otherwise.
        adds_sep: the same of the separator at the end.
        is_raw: tokens are text, with ▁ for spaces and `<0xXX>` for bytes, and no byte alphabet is used.
        composes: text is brought into Unicode's composed form first.
    """

    cuts: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    adds_sep: bool = False
    is_raw: bool = False
    composes: bool = False


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?"
    rf"|\p{{N}}{{1,3}}|{_O200K_TAIL}"
)
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_O200K_TAIL}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥\u0800-一\uac00-\ud7ff]+", r"\p{N}")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[[\p{Lu}\p{Ll}\p{Lt}]&&[^\u10d0-\u10ff]]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_SPARK = (
    *_DEEPSEEK3[:2],
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_JAIS2 = (
    _LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
    + "|".join(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s{1}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_LINES = r"[^\n]+|[\n]+"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_NAMES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    ("chatglm-bpe dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen", PreTokenizer((_QWEN2,), composes=True)),
    ("megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2", PreTokenizer((_QWEN2,))),
    ("qwen35", PreTokenizer((_QWEN35,), composes=True)),
    (
        "gpt-2 phi-2 mpt olmo jais exaone4 mellum modern-bert gigachat a.x-4.0 trillion granite-docling jina-es "
        "jina-de jina-v2-es jina-v2-de",
        PreTokenizer((_GPT2,)),
    ),
    ("roberta-bpe jina-v1-en jina-v2-code", PreTokenizer((_GPT2,), adds_sep=True)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_O200K,))),
    ("granite-embed-multi-97m", PreTokenizer((_O200K,), ignore_merges=True)),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
    ("spark2_5", PreTokenizer(_SPARK)),
    ("youtu", PreTokenizer(_YOUTU, ignore_merges=True)),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _QWEN2.replace(r"\p{N}|", r"\p{N}+|")), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("laguna", PreTokenizer((_LINES, _QWEN2))),
    ("ufakzeka", PreTokenizer((_QWEN2.removeprefix(f"{_SHORT}|"),))),
    ("chameleon", PreTokenizer(_CHAMELEON, adds_bos=True)),
    ("gemma4 granite-embed-multi-311m sarvam-moe", PreTokenizer((_LINES,), is_raw=True)),
)


def _by_name() -> Iterator[tuple[str, PreTokenizer]]:
    for names, how in _NAMES:
        for name in names.split():
            yield name, how


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(dict(_by_name()))


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the way to cut of a name.

    Raises:
        InvalidCheckpoint: the name is not known; a wrong way would fail softly, with more tokens and worse answers.
    """
    if name not in PRE_TOKENIZERS:
        raise InvalidCheckpoint(
            f"the pre-tokenizer {name!r} is not known here; put the model's tokenizer.json beside the file, or serve a "
            f"file with one of: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]
