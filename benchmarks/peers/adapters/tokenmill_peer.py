"""TokenMill, in process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from benchmarks.peers.adapters.adapter import OnStep, Setup, main
from benchmarks.peers.models import BITS_VARIABLE

from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm.llm import LLM
from tokenmill.llm.local import watch_prompt_logits

# Formats that no flag asks for: floats, of which float32 is what others are judged by, or as a file has them.
DTYPES = {"float32": "float32", "bf16": "bfloat16", "stored": "bfloat16"}


class TokenMill:
    """`tokenmill.LLM`, step by step."""

    packages = ("tokenmill", "torch")

    def __init__(self, setup: Setup) -> None:
        options: dict[str, Any] = {} if setup.weights in DTYPES else {"quantization": setup.weights}
        if setup.weights == "int4" and (bits := os.environ.get(BITS_VARIABLE)):
            options["quantization_bits"] = float(bits)
        if setup.texts is not None:  # logits are watched where the engine is on this thread
            options["async_scheduling"] = False
        self._llm = LLM(
            setup.model,
            dtype=DTYPES.get(setup.weights, "bfloat16"),
            num_threads=setup.threads,
            kv_cache_memory_bytes=setup.kv_bytes,
            max_num_seqs=setup.max_batch_size,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            **options,
        )

    def prepare(self, batch_size: int, context_len: int) -> None:
        """Nothing: rows and pages are taken at load."""

    def generate(self, prompts: list[list[int]], num_tokens: int, on_step: OnStep) -> None:
        """As one batch."""
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        outputs = [self._llm.submit(prompt, params) for prompt in prompts]
        while not all(output.finished for output in outputs):
            deltas = self._llm.step()
            if deltas:
                on_step([output.num_output_tokens for output in outputs])
            for delta in deltas:
                if delta.error is not None:
                    raise RuntimeError(delta.error)

    def logits(self, chunk: list[int]) -> Any:
        """Return those of a prompt, whose last position is left out."""
        pieces: list[Any] = []
        watch_prompt_logits(self._llm, lambda rows: pieces.append(np.array(rows, np.float32)))
        output = self._llm.submit(chunk, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0))
        while not output.finished:
            self._llm.step()
        return np.concatenate(pieces)

    def weight_bytes(self) -> int:
        """Return the packed matrices' memory."""
        return self._llm.info.weight_bytes


if __name__ == "__main__":
    main(TokenMill)
