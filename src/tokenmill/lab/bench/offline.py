"""Run a batch of requests through an engine in this process, timed step by step, for `throughput` and `latency`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.flags import add_config_file_flag, add_flags, build, check_names, read_given
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.lab.bench.workload import Prompt

if TYPE_CHECKING:
    from tokenmill.llm.llm import LLM

# Token ids are drawn from 0 to this or the end of the vocabulary, as the published recipes do.
HIGHEST_TOKEN_ID = 10_000


class Trace(msgspec.Struct, frozen=True):
    """The measured run of a batch. Times in seconds from its submission.

    Attributes:
        times: the end of each step that brought tokens.
        tokens: output tokens of all requests up to then.
        prefill_steps: number of these steps until every request had its first token.
    """

    times: list[float]
    tokens: list[int]
    prefill_steps: int

    @property
    def seconds(self) -> float:
        """Seconds from submission to the last token."""
        return self.times[-1]

    @property
    def prefill_seconds(self) -> float:
        """Seconds from submission until every request has its first token."""
        return self.times[self.prefill_steps - 1]

    @property
    def decode_step_seconds(self) -> list[float]:
        """Seconds of each step after that."""
        return [after - before for before, after in pairwise(self.times[self.prefill_steps - 1 :])]


def run_batch(
    llm: LLM, prompts: Sequence[Prompt], temperature: float, on_step: Callable[[int, int], None] | None = None
) -> Trace:
    """Generate as many tokens for each prompt as it asks for, whichever they are.

    Args:
        on_step: called after each step with the finished requests and the output tokens.

    Raises:
        TokenMillError: a request failed.
    """
    start = time.perf_counter()
    for prompt in prompts:
        llm.submit(
            prompt.token_ids, SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=prompt.output_len)
        )
    times: list[float] = []
    tokens: list[int] = []
    started: set[str] = set()
    finished = count = prefill_steps = 0
    while finished < len(prompts):
        deltas = llm.step()
        if not deltas:
            continue
        for delta in deltas:
            if delta.error is not None:
                raise TokenMillError(delta.error)
        times.append(time.perf_counter() - start)
        count += sum(len(delta.token_ids) for delta in deltas)
        tokens.append(count)
        if len(started) < len(prompts):
            started.update(delta.id for delta in deltas)
            prefill_steps += 1
        finished += sum(delta.finish_reason is not None for delta in deltas)
        if on_step is not None:
            on_step(finished, count)
    assert count == sum(prompt.output_len for prompt in prompts), "a request ended before its length"
    return Trace(times, tokens, prefill_steps)


def add_engine_flags(parser: Parser) -> None:
    """Add the flags of the engine and `--config`."""
    add_config_file_flag(parser)
    add_flags(parser, EngineConfig, "engine (--seed also draws the workload)")


def engine_config(namespace: argparse.Namespace) -> EngineConfig:
    """Build the engine's config from flags, environment and file.

    Raises:
        InvalidConfig: naming the flag.
    """
    given = read_given(namespace, os.environ)
    check_names(given, (EngineConfig,))
    return build(EngineConfig, given).resolve()


def highest_token_id(llm: LLM) -> int:
    """Return the highest token id; prompts are drawn from the ids 0 to this."""
    return min(HIGHEST_TOKEN_ID, llm.info.vocab_size - 1)


def check_room(llm: LLM, longest: int) -> None:
    """Refuse lengths that the engine has no room for.

    Raises:
        InvalidConfig: naming both numbers.
    """
    if longest > llm.info.max_model_len:
        raise InvalidConfig(f"lengths of up to {longest} tokens exceed the context of {llm.info.max_model_len}")


def engine_facts(llm: LLM) -> dict[str, Any]:
    """Return the engine's description of itself, as the start-up screen shows it."""
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(llm.info)
    return facts
