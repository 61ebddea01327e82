"""Small tokenizers of the kinds that real checkpoints bring, built in memory."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokenmill.serving.frontend.library_backend import LibraryBackend
from tokenmill.serving.frontend.tokenizer import Tokenizer as OurTokenizer

TEXTS = [
    "Once upon a time there was a little dog named Tom who liked to play with a red ball in the park.",
    "naïve café — Größe, 你好世界, здравствуй мир, नमस्ते, 👩‍👩‍👧 👍🏽 e\u0301 ✨",
] * 3
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """As Qwen and Llama 3: byte-level BPE; ids below 3 are special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<tool call>", "é!"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Mistral: pieces with a word marker, and a token for every byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghij kl.!", "▁a", "▁▁", "ab", "▁cab", "é", "你"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges=[], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁a", "b", "▁▁c", "d▁e", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """BERT's kind, whose decoder takes the spaces from before punctuation."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz.?!,'#", "do", "not", "do not", "n't"]
    pieces = [*words, *(f"##{word}" for word in words[4:]), "'s", "'ve", "'re", "'m", "' ", " '", " ' ", " ."]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """No decoder at all: words joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **files: dict) -> Path:
    """Write tokenizer.json and a tokenizer_config.json with a chat template; `files` are further JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def wrapped(library: Tokenizer) -> OurTokenizer:
    """Return our tokenizer over the library's."""
    return OurTokenizer(LibraryBackend(library, json.loads(library.to_str())["decoder"]))
