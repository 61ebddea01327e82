"""Open the in-process engine for the command line; everything heavy is imported behind this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm.model_protocol import Delta, Deltas, Messages

if TYPE_CHECKING:
    from tokenmill.llm.llm import LLM


def load_llm(config: EngineConfig) -> LLM:
    """Return the engine of a config, in this process.

    Raises:
        TokenMillError: the model cannot be served on this machine.
    """
    import dataclasses

    from tokenmill.llm.llm import LLM

    return LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.metadata})


def watch_prompt_logits(llm: LLM, watch: Callable[[Any], None]) -> None:
    """Let a function see the logits of all positions of prompts whose requests ask for `prompt_logprobs`.

    Args:
        watch: gets [n, vocabulary] float32 arrays, in the order of the positions; the last position is left out.

    Raises:
        InvalidConfig: the engine runs its steps on another thread or in several processes.
    """
    runner: Any = getattr(llm._local.engine.executor, "runner", None)
    if not hasattr(runner, "watch_prompt_logits"):
        raise InvalidConfig("logits can be watched with async_scheduling=False and a single rank")
    runner.watch_prompt_logits(watch)


class LocalModel:
    """A model in this process, for `chat --local` and `complete --local`."""

    def __init__(self, model: str) -> None:
        """Load the model; raise TokenMillError if that fails."""
        from tokenmill.config.model_files import default_sampling

        self._llm = load_llm(EngineConfig(model=model))
        self._defaults = default_sampling(Path(self._llm.info.model))

    def chat(self, messages: Messages, fields: Mapping[str, Any]) -> Deltas:
        """Stream the assistant's next message from the engine in this process.

        Raises:
            InvalidRequest: the conversation no longer fits, or a parameter is out of range.
        """
        return self._stream(messages, fields)

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Deltas:
        """Stream the continuation of a text from the engine in this process.

        Raises:
            InvalidRequest: the prompt does not fit, or a parameter is out of range.
        """
        return self._stream(prompt, fields)

    def _stream(self, prompt: Any, fields: Mapping[str, Any]) -> Deltas:
        for delta in self._llm.stream(prompt, SamplingParams(**{**self._defaults, **fields})):
            yield Delta(delta.text, delta.finish_reason)
