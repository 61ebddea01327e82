"""Print the tokens per second of processor time that vectors take, one JSON line a run; one thread, one encoder.

    python benchmarks/embeddings.py FOLDER --tokens 32 --texts 256 --engine tokenmill --quantization int8
    python benchmarks/embeddings.py FOLDER --engine sentence-transformers --dtype bfloat16

Texts are drawn words of one token each. The best of three rounds counts, after a short one. Time is that of processors,
so both engines may be measured one after the other on a machine that has other work.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
    "or",
    "had",
    "an",
    "they",
)


def encoder_of(arguments: argparse.Namespace) -> Callable[[list[str]], object]:
    """Return the function that turns texts into vectors."""
    if arguments.engine == "sentence-transformers":
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        model = SentenceTransformer(arguments.model, device="cpu").to(getattr(torch, arguments.dtype))
        model.max_seq_length = 512
        return lambda texts: model.encode(texts, batch_size=32)
    from tokenmill import LLM

    llm = LLM(arguments.model, dtype=arguments.dtype, quantization=arguments.quantization, num_threads=1)
    return lambda texts: llm.embed(texts, use_tqdm=False)


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engine", choices=("tokenmill", "sentence-transformers"), default="tokenmill")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, embed = random.Random(arguments.seed), encoder_of(arguments)
    # Two tokens are added around each text.
    texts = [" ".join(rng.choices(WORDS, k=arguments.tokens - 2)) for _ in range(arguments.texts)]
    embed(texts[:8])
    seconds = []
    for _ in range(3):
        started = time.process_time()
        embed(texts)
        seconds.append(time.process_time() - started)
    rate = arguments.tokens * arguments.texts / min(seconds)
    print(json.dumps({**vars(arguments), "tokens_per_cpu_second": round(rate)}))


if __name__ == "__main__":
    main()
