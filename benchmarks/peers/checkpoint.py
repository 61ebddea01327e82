"""The model of the comparison: Qwen3-0.6B's shape with seeded random weights in bfloat16, and a tokenizer of its size.

Or Gemma-3-1B's shape, with the same tokenizer, which has fewer tokens than the model.

Speed does not depend on what the weights say, so nothing is downloaded. The tokenizer is byte-level BPE with as many
tokens as the real one; servers need one to write text.

    python -m benchmarks.peers.checkpoint FOLDER [qwen3-0.6b|gemma3-1b|FILE.gguf]

Of a GGUF file of floats it writes the same model in float32.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCAB_SIZE = 151_936
END_OF_TEXT, MESSAGE_START, MESSAGE_END = 151_643, 151_644, 151_645
SPECIAL = {END_OF_TEXT: "<|endoftext|>", MESSAGE_START: "<|im_start|>", MESSAGE_END: "<|im_end|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEED = 0


def make_checkpoint(folder: Path, shape: str = "qwen3-0.6b") -> None:
    """Write config, weights (1.2 or 2 GB) and tokenizer in the Hugging Face layout; needs torch and transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config({"qwen3-0.6b": qwen3, "gemma3-1b": gemma3}[shape](), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def qwen3() -> PreTrainedConfig:
    """As published with Qwen3-0.6B."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=MESSAGE_END,
        pad_token_id=END_OF_TEXT,
        dtype="bfloat16",
    )


def gemma3() -> PreTrainedConfig:
    """As published with Gemma-3-1B."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        bos_token_id=END_OF_TEXT,
        eos_token_id=MESSAGE_END,
        pad_token_id=END_OF_TEXT,
        dtype="bfloat16",
    )


def copy_gguf(folder: Path, file: Path) -> None:
    """Write what transformers reads of a GGUF file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # As read it says of itself that it is quantized, and is not saved.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: 256 bytes, then merges of two and of three bytes."""
    alphabet = byte_alphabet()
    vocab = {char: number for number, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    pairs = itertools.product(alphabet, alphabet)
    triples = ((a + b, c) for a, b in itertools.product(alphabet, alphabet) for c in alphabet)
    for left, right in itertools.chain(pairs, triples):
        while len(vocab) in SPECIAL:
            vocab[SPECIAL[len(vocab)]] = len(vocab)
        if len(vocab) == VOCAB_SIZE:
            break
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **flags} for number, text in SPECIAL.items()],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[MESSAGE_END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "model_max_length": 40_960,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def byte_alphabet() -> list[str]:
    """The printable characters that stand for the bytes 0 to 255 in byte-level BPE, as GPT-2 chose them."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = itertools.count(256)
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    if sys.argv[-1].endswith(".gguf"):
        copy_gguf(target, Path(sys.argv[-1]))
    else:
        make_checkpoint(target, *sys.argv[2:3])
