"""Random tokenizers of byte-pair encoding in all the forms that checkpoints bring, and texts that are hard for them."""

from typing import Any

import numpy as np

from tokenmill.model.vocabulary.byte_level import byte_of_character

MARK = "▁"
LETTERS = "abcdeé ▁.\n1你🦙\u0301"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _pick(rng: np.random.Generator, options: list[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def random_model(rng: np.random.Generator, is_byte_level: bool) -> dict[str, Any]:
    """Random merges over few letters, so that many of them meet in a text."""
    letters = list(byte_of_character()) if is_byte_level else list(LETTERS)
    if rng.random() < 0.3:
        letters = [letter for letter in letters if rng.random() < 0.8] or ["a"]
    tokens = list(dict.fromkeys(["<unk>", *letters]))
    if rng.random() < 0.5:
        tokens += [f"<0x{byte:02X}>" for byte in range(256) if rng.random() < 0.99 or byte > 4]
    common = [letter for letter in ("a", "b", "c", "Ġ", MARK, "é", "Ã", "©", "1", ".") if letter in letters]
    merges: list[list[str]] = []
    parts = common or letters[:2]
    for _ in range(int(rng.integers(0, 40))):
        left, right = _pick(rng, parts), _pick(rng, parts)
        if left + right not in tokens:
            tokens.append(left + right)
            parts = [*parts, left + right]
        if [left, right] not in merges:
            merges.append([left, right])
    rng.shuffle(merges)
    tokens += ["abcab", "é!"]
    ids = rng.permutation(len(tokens)).tolist() if rng.random() < 0.5 else list(range(len(tokens)))
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": _pick(rng, [None, "<unk>"]),
        "continuing_subword_prefix": _pick(rng, [None, ""]),
        "end_of_word_suffix": None,
        "fuse_unk": bool(rng.random() < 0.5),
        "byte_fallback": bool(rng.random() < 0.5),
        "ignore_merges": bool(rng.random() < 0.5),
        "vocab": dict(zip(dict.fromkeys(tokens), ids, strict=False)),
        "merges": [" ".join(one) for one in merges] if rng.random() < 0.3 else merges,
    }


def random_added(rng: np.random.Generator, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Added tokens with all flags, some of them in the vocabulary."""
    texts = ["<s>", "</s>", "<tool call>", "ab", "É", "a b", "<unk>", "é"]
    strips = rng.random() < 0.5
    if not strips:  # where tokens take the space around them, the library panics at tokens of space
        texts += ["  ", "\n\n"]
    size = len(model["vocab"])
    added: list[dict[str, Any]] = []
    for text in texts:
        if rng.random() < 0.4:
            number = model["vocab"].get(text)
            if number is None:
                number, size = size, size + 1
            flags = {name: bool(rng.random() < 0.3) for name in ("single_word", "lstrip", "rstrip", "special")}
            flags |= {} if strips else {"lstrip": False, "rstrip": False}
            added.append({"id": number, "content": text, "normalized": bool(rng.random() < 0.5), **flags})
    return added


def random_file(rng: np.random.Generator) -> dict[str, Any]:
    """Return a whole tokenizer.json."""
    is_byte_level = bool(rng.random() < 0.5)
    model = random_model(rng, is_byte_level)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    prepend = {"type": "Prepend", "prepend": MARK}
    split = {"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Isolated", "invert": False}
    digits = {"type": "Digits", "individual_digits": True}
    forms = [{"type": "NFC"}, {"type": "NFKC"}, {"type": "Lowercase"}, None, None]
    if is_byte_level:
        adds_space, uses_regex = bool(rng.random() < 0.3), bool(rng.random() < 0.5)
        bytes_ = {"type": "ByteLevel", "add_prefix_space": adds_space, "trim_offsets": True, "use_regex": uses_regex}
        several = [split, {**bytes_, "add_prefix_space": False}]
        steps = _pick(rng, [[bytes_], several, [digits, *several]])
        normalizer = None if adds_space and len(steps) == 1 else _pick(rng, forms)
        pre_tokenizer, decoder = {"type": "Sequence", "pretokenizers": steps}, {"type": "ByteLevel"}
    else:
        metaspace = {"type": "Metaspace", "replacement": MARK, "split": bool(rng.random() < 0.5)}
        metaspace["prepend_scheme"] = _pick(rng, ["always", "first", "never"])
        cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        marks = _pick(rng, [spaces, {"type": "Sequence", "normalizers": [prepend, spaces]}])
        normalizer, pre_tokenizer = _pick(
            rng, [(marks, None), (marks, cut), (None, metaspace), (_pick(rng, forms), split)]
        )
        stages = [{**spaces, "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
        decoder = {"type": "Sequence", "decoders": stages}
    before = [{"SpecialToken": {"id": "<x>", "type_id": 0}}] if rng.random() < 0.5 else []
    after = [{"SpecialToken": {"id": "<x>", "type_id": 0}}] if rng.random() < 0.3 else []
    around = {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<x>": {"id": "<x>", "ids": [0], "tokens": ["<x>"]}},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": random_added(rng, model),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": around if before or after else None,
        "decoder": decoder,
        "model": model,
    }


def random_texts(rng: np.random.Generator, count: int) -> list[str]:
    """Texts of the tokenizers' letters and added tokens."""
    parts = [
        *LETTERS,
        *"aabbccab  ",
        "<s>",
        "</s>",
        "<tool call>",
        "É",
        "abcab",
        "  ",
        "e\u0301",
        "\x00",
        "ﬁ",
        "<0x41>",
    ]
    return ["".join(_pick(rng, parts) for _ in range(int(rng.integers(0, 60)))) for _ in range(count)]
