"""The tokenizer: byte-level BPE of 4,096 tokens, trained on the generators' own text.

Digits and letters of all-capital runs are always single tokens, and a capitalized word is never joined with the
space before it: so a name, a number or a code is the same tokens wherever it stands, and copying is exact.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from rich.progress import track
from skills import SKILLS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
SPLIT = (
    r"'(?i:s|t|re|ve|m|ll|d)(?!\p{L})"
    r"|\p{Lu}(?=\p{Lu})"
    r"|\p{Lu}\p{Ll}*"
    r"| ?[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}\p{M}]+"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
VOCAB_SIZE = 4096
HERE = Path(__file__).parent


def corpus(seed: int, samples: int) -> Iterator[str]:
    """Texts of all skills, alike in number, from the training part only."""
    rng = random.Random(f"tokenizer-{seed}")
    skills = list(SKILLS.values())
    for index in range(samples):
        sample = skills[index % len(skills)](rng, "train")
        for message in sample.messages:
            yield message["content"]
            yield message.get("reasoning_content", "")
            for call in message.get("tool_calls", ()):
                yield json.dumps(call["function"])
        for tool in sample.tools:
            yield json.dumps(tool["function"])


def train_tokenizer(seed: int = 1, samples: int = 60_000) -> Tokenizer:
    """Train the tokenizer; the same seed gives the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    texts = track(corpus(seed, samples), description="tokenizer", total=None)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def tokenizer_config(template: str) -> dict[str, object]:
    """The content of ``tokenizer_config.json``, with the chat template inside."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json into a folder."""
    parser = argparse.ArgumentParser(description="Train the demo model's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(arguments.seed)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    config = tokenizer_config((HERE / "chat_template.jinja").read_text())
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens written to {arguments.out}")


if __name__ == "__main__":
    main()
