"""Vocabularies in GGUF files that the gguf package writes: each algorithm against a plain one written out here."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.vocabulary import mapped_file
from tokenmill.model.vocabulary.recipe import build_vocabulary
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.folder import MAPPED, tokenizer_files
from tokenmill.model.weights.gguf.pre_tokenizers import PRE_TOKENIZERS
from tokenmill.model.weights.gguf.tokenizer import build_tokenizer, piece_files
from tokenmill.model.weights.gguf.vocabulary import Vocabulary, read_vocabulary
from tokenmill.serving.frontend.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
BYTES = [(f"<0x{number:02X}>", BYTE, 0.0) for number in range(256)]
Tokens = list[tuple[str, int, float]]


def write(path: Path, model: str, tokens: Tokens, **more: Any) -> Path:
    """A file with a vocabulary; keys of `more` follow `tokenizer.ggml.`, and `__` stands for a point."""
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.name", more.pop("name", "some"))
    writer.add_tokenizer_model(model)
    writer.add_token_list([token for token, _, _ in tokens])
    writer.add_token_types([kind for _, kind, _ in tokens])
    writer.add_token_scores([score for _, _, score in tokens])
    for key, value in more.items():
        place = f"tokenizer.ggml.{key}" if "__" not in key else key.replace("__", ".")
        match value:
            case bool():
                writer.add_bool(place, value)
            case int():
                writer.add_uint32(place, value)
            case str():
                writer.add_string(place, value)
            case _:
                writer.add_array(place, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(path: Path) -> Vocabulary:
    return read_vocabulary(open_gguf(path).metadata)


def load(path: Path) -> Tokenizer:
    folder = path.parent / "folder"
    folder.mkdir()
    for name, content in tokenizer_files(open_gguf(path)).items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


def texts(rng: np.random.Generator, letters: str, count: int) -> list[str]:
    return ["".join(rng.choice(list(letters), rng.integers(1, 24))) for _ in range(count)]


def sentence_pieces(rng: np.random.Generator, letters: str) -> Tokens:
    """Random pieces of up to five letters, among them all that they are made of in some way."""
    pieces = {*letters, "▁"}
    for _ in range(60):
        pieces.add("".join(rng.choice(sorted(pieces), 2))[:6])
    scored = [(piece, NORMAL, -float(rng.integers(1, 40))) for piece in sorted(pieces)]
    return [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0), *BYTES, *scored]


def joined(text: str, tokens: Tokens) -> list[int]:
    """SentencePiece's BPE: join the pair whose text has the highest score, the leftmost of several, to the end."""
    ids = {token: number for number, (token, kind, _) in enumerate(tokens) if kind == NORMAL}
    parts = list(text.replace(" ", "▁"))
    while True:
        found = [
            (-tokens[ids[left + right]][2], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in ids
        ]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    bytewise = {token: number for number, (token, kind, _) in enumerate(tokens) if kind == BYTE}
    return [
        number
        for part in parts
        for number in ([ids[part]] if part in ids else [bytewise[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_scores_decide_what_sentence_pieces_join(has_prefix: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    tokens = sentence_pieces(rng, "abcd")
    # Equal scores are told apart by ids there and by places here: none are equal.
    order = rng.permutation(len(tokens)).tolist()
    tokens = [(token, kind, -float(order[number])) for number, (token, kind, _) in enumerate(tokens)]
    tokenizer = load(write(tmp_path / "x.gguf", "llama", tokens, add_space_prefix=has_prefix, add_bos_token=False))
    for text in texts(rng, "abcd é中", 200):
        want = joined((" " if has_prefix else "") + text, tokens)
        assert tokenizer.encode(text) == want, text
        assert tokenizer.decode(want) == text


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_written_natively_are_those_of_the_library(
    has_prefix: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Of ties among scores, marks of JSON in tokens, and tokens that no merge makes."""
    native = pytest.importorskip("tokenmill._native")
    tokens = [
        *sentence_pieces(rng, 'ab"\\\n\x01é中'),
        ("<|im_end|>", CONTROL, 0.0),
        ("[tag]", USER, 0.0),
        ("ab[", UNUSED, 9.0),
    ]
    tokens = [(token, kind, float(round(score))) for token, kind, score in tokens]
    file = open_gguf(write(tmp_path / "x.gguf", "llama", tokens, add_space_prefix=has_prefix))
    found = read_vocabulary(file.metadata)
    ours, library = piece_files(found, file.metadata), build_tokenizer(found, file.metadata)
    assert ours is not None
    written, mapped = ours
    assert json.loads(written) == json.loads(library.to_str())
    assert mapped == build_vocabulary(library.to_str().encode(), (), native)
    assert set(tokenizer_files(file)) == {MAPPED, "tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_a_folder_has_its_mapped_vocabulary_beside_it(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenmill._native")
    monkeypatch.setattr(mapped_file, "LEAST_BYTES", 0)
    files = tokenizer_files(open_gguf(write(tmp_path / "x.gguf", "llama", sentence_pieces(rng, "abc"))))
    mapped = files.pop(MAPPED)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    mapped_file.keep_vocabulary(tmp_path, mapped)
    assert mapped_file.open_vocabulary(tmp_path, tmp_path / "cache") is not None
    assert not (tmp_path / "cache").exists(), "nothing is made anew"
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"] + b" ")
    assert mapped_file.open_vocabulary(tmp_path, tmp_path / "cache") is not None
    assert (tmp_path / "cache").exists(), "what was made of another file is not taken"


def test_special_tokens_are_cut_out_and_bos_comes_first(tmp_path: Path, rng: np.random.Generator) -> None:
    tokens = [*sentence_pieces(rng, "ab"), ("<|im_end|>", NORMAL, 0.0), ("[tag]", USER, 0.0)]
    end, tag = len(tokens) - 2, len(tokens) - 1
    path = write(tmp_path / "x.gguf", "llama", tokens, add_eos_token=True, add_space_prefix=False)
    assert load(path).encode("<|im_end|>[tag]</s>") == [1, end, tag, 2, 2]
    assert vocabulary(path).ends == {2, end}, "by its key and by its text, though the file calls it normal"


def test_a_merge_that_begins_with_a_space_is_cut_behind_it(tmp_path: Path) -> None:
    tokens = [(letter, NORMAL, 0.0) for letter in ["a", "b", "Ġ", " a", "ab", " ab"]]
    path = write(tmp_path / "x.gguf", "gpt2", tokens, pre="gpt-2", merges=["a b", " a b"])
    assert load(path).encode("ab") == [4]


@pytest.mark.parametrize(("pre", "want"), [("llama-bpe", ["abc"]), ("qwen2", ["ab", "c"])])
def test_some_vocabularies_keep_a_piece_that_is_a_token(pre: str, want: list[str], tmp_path: Path) -> None:
    tokens = [(token, NORMAL, 0.0) for token in ["a", "b", "c", "ab", "abc"]]
    tokenizer = load(write(tmp_path / "x.gguf", "gpt2", tokens, pre=pre, merges=["a b"], add_bos_token=False))
    assert [tokenizer.token(number) for number in tokenizer.encode("abc")] == want


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        ("llama-bpe", "don't 12345", ["don", "'t", "Ġ", "123", "45"]),
        ("qwen2", "don't 123", ["don", "'t", "Ġ", "1", "2", "3"]),
        ("smollm", "x 12\n\ny", ["x", "Ġ", "1", "2", "Ċ", "Ċ", "y"]),
        ("default", "a==b 1234", ["a", "==", "b", "Ġ", "123", "4"]),
        ("gpt-4o", "CaféÉcole", ["CafÃ©", "Ãīcole"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("deepseek-v3", "a1234漢字", ["a", "123", "4", "æ¼¢åŃĹ"]),
        ("qwen35", "x\u0331y", ["xÌ±y"]),
        ("qwen2", "x\u0331y", ["x", "Ì±", "y"]),
    ],
)
def test_names_say_how_text_is_cut(pre: str, text: str, want: list[str], tmp_path: Path) -> None:
    # A vocabulary that has each piece whole, and each byte: merges would hide where the cuts are.
    alphabet = sorted({character for piece in want for character in piece})
    merges = [f"{piece[:at]} {piece[at]}" for piece in want for at in range(1, len(piece))]
    pieces = [piece[: at + 1] for piece in want for at in range(1, len(piece))]
    tokens = [(token, NORMAL, 0.0) for token in dict.fromkeys([*alphabet, *pieces])]
    unique = list(dict.fromkeys(merges))
    tokenizer = load(write(tmp_path / "x.gguf", "gpt2", tokens, pre=pre, merges=unique, add_bos_token=False))
    assert [tokenizer.token(number) for number in tokenizer.encode(text)] == want


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_name_encodes_and_decodes_anything(pre: str, tmp_path: Path, rng: np.random.Generator) -> None:
    alphabet = [chr(number) for number in (*range(33, 127), *range(161, 324))]
    tokens = [(token, NORMAL, 0.0) for token in alphabet] + [("▁", NORMAL, 0.0), *BYTES]
    tokenizer = load(write(tmp_path / "x.gguf", "gpt2", tokens, pre=pre, merges=[], add_bos_token=False))
    for text in texts(rng, string.printable + "éÉ中日0१🦙\u2028\u00a0", 20):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def best_pieces(text: str, tokens: Tokens) -> float:
    """The highest sum of scores by which a text can be cut; a character that is in no piece costs ten more than any."""
    scores = {token: 0.0 if kind == USER else score for token, kind, score in tokens}
    worst = min(score for _, kind, score in tokens) - 10
    best = [0.0] + [-np.inf] * len(text)
    for end in range(1, len(text) + 1):
        for start in range(max(0, end - 8), end):
            piece = text[start:end]
            score = scores.get(piece, worst if len(piece) == 1 else -np.inf)
            best[end] = max(best[end], best[start] + score)
    return best[-1]


def test_unigram_finds_the_best_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    pieces = {"▁", *"abcd", *("".join(rng.choice(list("abcd▁"), rng.integers(2, 5))) for _ in range(60))}
    scored = [(piece, NORMAL, -float(rng.random() * 12)) for piece in sorted(pieces)]
    tokens = [("<pad>", CONTROL, 0.0), ("</s>", CONTROL, 0.0), ("<unk>", UNKNOWN, 0.0), *scored]
    path = write(tmp_path / "x.gguf", "t5", tokens, remove_extra_whitespaces=True)
    tokenizer = load(path)
    scores = {token: score for token, _, score in tokens}
    for text in texts(rng, "abcd ", 100):
        words = " ".join(text.split())
        ids = tokenizer.encode(text)
        assert ids[-1] == 1, "the end follows every text"
        found = [str(tokenizer.token(number)) for number in ids[:-1]]
        want = "▁" + words.replace(" ", "▁") if words else ""
        assert "".join(found) == want
        assert sum(scores[piece] for piece in found) == pytest.approx(best_pieces(want, tokens))


def test_word_pieces_are_the_longest(tmp_path: Path) -> None:
    stored = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁play", "ing", "▁the", "▁,", "▁中", "▁cafe", "s", "▁a"]
    tokens = [(token, CONTROL if token.startswith("[") else NORMAL, 0.0) for token in stored]
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3, "mask_token_id": 4}
    tokenizer = load(write(tmp_path / "x.gguf", "bert", tokens, **ids))
    tokens_of = [tokenizer.token(number) for number in tokenizer.encode("The CAFÉS, playings 中a xyz")]
    assert tokens_of == ["[CLS]", "the", "cafe", "##s", ",", "play", "##ing", "##s", "中", "a", "[UNK]", "[SEP]"]
    assert tokenizer.decode(tokenizer.encode("the playing cafes")) == "the playing cafes"


def test_gemma_4_merges_text_and_keeps_lines(tmp_path: Path) -> None:
    tokens = [("<bos>", CONTROL, 0.0), ("<eos>", CONTROL, 0.0), *BYTES]
    tokens += [(token, NORMAL, 0.0) for token in ["a", "b", "▁", "ab", "▁ab", "\n", "\n\n", "ba"]]
    merges = ["a b", "▁ ab", "\n \n"]
    path = write(tmp_path / "x.gguf", "gemma4", tokens, merges=merges, bos_token_id=0, eos_token_id=1)
    tokenizer = load(path)
    spelled = [tokenizer.token(number) for number in tokenizer.encode("ab ab\n\nab é")]
    assert spelled == ["<bos>", "ab", "▁ab", "\n\n", "ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab ab\n\nab é")) == "ab ab\n\nab é"
    spelled = [tokenizer.token(number) for number in tokenizer.encode("ba\nba")]
    assert spelled == ["<bos>", "b", "a", "\n", "b", "a"], "no merges lead to the token of the whole line"


def test_tokens_that_end_a_message_but_not_a_text_do_not_end_it(tmp_path: Path) -> None:
    tokens = [(token, CONTROL, 0.0) for token in ["<|return|>", "<|call|>", "<|end|>", "<|start|>"]]
    path = write(tmp_path / "x.gguf", "gpt2", tokens, pre="gpt-4o", merges=[], eos_token_id=0)
    assert vocabulary(path).ends == {0, 1}


def test_a_tag_of_markup_does_not_end_gemmas_texts(tmp_path: Path) -> None:
    tokens = [("<eos>", CONTROL, 0.0), ("<end_of_turn>", CONTROL, 0.0), ("</s>", USER, 0.0)]
    assert vocabulary(write(tmp_path / "x.gguf", "llama", tokens, eos_token_id=0)).ends == {0, 1}


def test_ids_of_infilling_are_found_by_key_and_by_text(tmp_path: Path) -> None:
    tokens = [(token, CONTROL, 0.0) for token in ["<fim_prefix>", "<fim_suffix>", "x", "<fim_middle>", "<fim_pad>"]]
    path = write(tmp_path / "x.gguf", "gpt2", tokens, pre="starcoder", merges=[], fim_mid_token_id=2)
    found = vocabulary(path)
    assert found.infilling == {"prefix": 0, "suffix": 1, "middle": 2, "pad": 4}
    assert found.ends == {4}
    assert load(path).special_tokens["fim_middle_token"] == "x"


def test_without_a_key_no_comma_is_bos(tmp_path: Path) -> None:
    tokens = [(character, NORMAL, 0.0) for character in "abcdefghijk,"]
    assert load(write(tmp_path / "x.gguf", "gpt2", tokens, pre="qwen2", merges=[])).bos_token is None


def test_white_space_after_phi_3s_special_tokens_is_taken(tmp_path: Path, rng: np.random.Generator) -> None:
    tokens = [*sentence_pieces(rng, "a"), ("<|user|>", CONTROL, 0.0), ("</end>", USER, 0.0)]
    path = write(tmp_path / "x.gguf", "llama", tokens, name="Phi-3 mini", add_bos_token=False, add_space_prefix=False)
    tokenizer = load(path)
    assert tokenizer.encode("<|user|>\n a") == tokenizer.encode("<|user|>a")
    assert tokenizer.encode("</end>\n a") == tokenizer.encode("</end>a")


def test_several_templates_are_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.gguf",
        "gpt2",
        [("a", NORMAL, 0.0)],
        pre="qwen2",
        merges=[],
        tokenizer__chat_template="plain",
        tokenizer__chat_templates=["tool_use"],
        tokenizer__chat_template__tool_use="with tools",
    )
    (config,) = [json.loads(text) for name, text in tokenizer_files(open_gguf(path)).items() if "config" in name][:1]
    assert config["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("rwkv", {}, "of the kind 'rwkv', which is not supported"),
        ("gpt2", {"pre": "kimi-k2"}, "the pre-tokenizer 'kimi-k2' is not known here; put the model's tokenizer.json"),
        ("gpt2", {"pre": "qwen2", "merges": ["ab"]}, "the merge 'ab' has no space"),
        ("gpt2", {"pre": "qwen2", "merges": ["a zz"]}, "the vocabulary cannot be used: "),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(
    model: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.gguf", model, [("a", NORMAL, 0.0)], **more)
    with pytest.raises(InvalidCheckpoint, match=message) as raised:
        tokenizer_files(open_gguf(path))
    assert "\n" not in str(raised.value)
