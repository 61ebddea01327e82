"""`tokenmill bench steps`: run steps of many sizes and fit their times, so that a simulation needs no traffic."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig
from tokenmill.lab.bench.offline import add_engine_flags, engine_config, highest_token_id, run_batch
from tokenmill.lab.bench.workload import Prompt, at_least
from tokenmill.lab.simulate.fitting import write_model

# How many tokens each request of a batch brings, on average.
OUTPUT_TOKENS = 24


def batches(longest: int, most_rows: int, kv_tokens: int, source: random.Random, top: int) -> Iterator[list[Prompt]]:
    """Yield batches of 1, 2, 4 ... requests, each with prompts of about 1, 1/4, 1/16 ... of the longest length.

    Lengths vary in each batch, so that prompts and decodes of all sizes meet.

    Args:
        longest: most tokens of prompt and output.
        most_rows: most requests that run at the same time.
        kv_tokens: tokens that the cache holds: larger batches are left out.
        top: the highest token id.
    """
    for rows in (1 << power for power in range(most_rows.bit_length())):
        context = longest - 2 * OUTPUT_TOKENS
        while context >= 1:
            if rows * (context + 2 * OUTPUT_TOKENS) <= kv_tokens:
                yield [_prompt(source, context, top) for _ in range(rows)]
            context //= 4


def _prompt(source: random.Random, context: int, top: int) -> Prompt:
    token_ids = [source.randint(0, top) for _ in range(source.randint(max(1, context // 2), context))]
    return Prompt(token_ids, source.randint(OUTPUT_TOKENS // 2, 2 * OUTPUT_TOKENS))


def run(arguments: Sequence[str]) -> int:
    """Run the batches, fit and write the model; returns 0.

    Raises:
        TokenMillError: a flag is out of range, or the model cannot be loaded.
    """
    namespace = make_parser().parse(arguments)
    at_least("--longest", namespace.longest, 4 * OUTPUT_TOKENS)
    config = engine_config(namespace)
    if config.speculative_config is not None:
        raise InvalidConfig("bench steps measures steps without drafts: leave out --speculative-config")
    from tokenmill.llm.local import load_llm

    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        log = Path(config.step_log or Path(folder) / "steps.log")
        with load_llm(replace(config, step_log=str(log))) as llm:
            longest = min(namespace.longest, llm.info.max_model_len)
            sizes = longest, min(namespace.most_rows, llm.info.max_num_seqs), llm.info.num_pages * llm.info.page_size
            for batch in batches(*sizes, random.Random(config.seed), highest_token_id(llm)):
                tokens = sum(len(prompt.token_ids) for prompt in batch)
                print(f"{len(batch)} requests with {tokens:,} tokens", file=sys.stderr)
                run_batch(llm, batch, temperature=0.6)
        write_model([log], Path(namespace.output))
    return 0


def make_parser() -> Parser:
    """Return the parser of `bench steps`."""
    parser = Parser("bench steps", "Run steps of many sizes and fit the time of a step (see `fit`).")
    parser.add_argument(
        "-o", "--output", default="steps.json", metavar="FILE", help="file for the step model (default: %(default)s)"
    )
    parser.add_argument("--longest", type=int, default=2048, metavar="N", help="tokens of a request (default: 2048)")
    parser.add_argument("--most-rows", type=int, default=64, metavar="N", help="requests at a time (default: 64)")
    add_engine_flags(parser)
    return parser
