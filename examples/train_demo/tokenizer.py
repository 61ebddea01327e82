"""The tokenizer: byte-level BPE of 2,560 tokens, trained on the generators' own text.

Digits and letters of all-capital runs are always single tokens, and only the commonest words that nobody asks to have
copied are joined with the space before them: so a name, a number, a word or a code is the same tokens wherever it
stands, and copying is exact. A first tokenizer had 4,096 tokens: half of them came up less than once in a thousand
conversations, and the names among them were what the model could not copy.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.progress import track
from skills import SKILLS, vocabulary, words
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
# {joined}: words that take the space before them.
SPLIT = (
    r"'(?i:s|t|re|ve|m|ll|d)(?!\p{L})"
    r"|\p{Lu}(?=\p{Lu})"
    r"|\p{Lu}\p{Ll}*"
    r"| (?:{joined})(?!\p{L})"
    r"|[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}\p{M}]+"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
NUM_JOINED = 100
VOCAB_SIZE = 2560
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


def listed_words() -> set[str]:
    """The words that the generators draw from: any of them may have to be copied."""
    lists = [value for module in (vocabulary, words) for value in vars(module).values() if isinstance(value, list)]
    return {word for phrases in lists for phrase in phrases for word in phrase.split()}


def joined_words(texts: list[str]) -> list[str]:
    """The commonest small words that nearly always follow a space and are in none of the lists, longest first."""
    spaced, anywhere = Counter[str](), Counter[str]()
    for text in texts:
        spaced.update(re.findall(r"(?<= )[a-z]{2,}(?![a-zA-Z])", text))
        anywhere.update(re.findall(r"(?<![a-zA-Z])[a-z]{2,}(?![a-zA-Z])", text))
    listed = listed_words()
    common = [w for w, n in spaced.most_common() if n >= 0.97 * anywhere[w] and w not in listed]
    return sorted(common[:NUM_JOINED], key=lambda word: (-len(word), word))


def train_tokenizer(seed: int = 1, samples: int = 60_000) -> Tokenizer:
    """Train the tokenizer; the same seed gives the same vocabulary."""
    texts = list(track(corpus(seed, samples), description="tokenizer", total=None))
    split = SPLIT.replace("{joined}", "|".join(joined_words(texts)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
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
