"""Engines without the frontend: requests of token ids in, token ids out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenmill.config.configs import EngineConfig
from tokenmill.config.flags import Given, build
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.startup.assembly.setup import BuiltEngine, build_engine


@contextmanager
def running(folder: Path, platform: Any, **options: Any) -> Iterator[Engine]:
    """An engine, closed at the end; without a platform the CPU's own, with the reference attention: the oracle."""
    with built(folder, platform, **options) as parts:
        yield parts.engine


@contextmanager
def built(folder: Path, platform: Any, **options: Any) -> Iterator[BuiltEngine]:
    """The same, with what it says of itself."""
    own = {"device": "cpu", "attention_backend": "reference", "kernels": "torch"} if platform is None else {}
    if platform is not None:
        own = {"device": platform.device if platform.name == "cuda" else "cpu"}
    # What is set by TOKENMILL_ variables (`TOKENMILL_PDL=0`) holds for every check.
    given = Given({"model": str(folder), **own, **options}, os.environ)
    config = build(EngineConfig, given).resolve()
    parts = build_engine(config, platform=platform)
    try:
        yield parts
    finally:
        parts.engine.close()


def generate(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """The tokens of each prompt's output.

    Raises:
        RuntimeError: a request ended with an error.
    """
    return [[token for output in own for token in output.token_ids] for own in outputs(engine, prompts, params)]


def outputs(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[TokenOutput]]:
    """All that is told of each prompt's output.

    Raises:
        RuntimeError: a request ended with an error.
    """
    told: dict[str, list[TokenOutput]] = {str(number): [] for number in range(len(prompts))}
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(AddRequest(id=str(number), prompt_token_ids=list(prompt), params=own))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            told[output.id].append(output)
    return list(told.values())
