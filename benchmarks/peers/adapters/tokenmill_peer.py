"""TokenMill, in process."""

from __future__ import annotations

from benchmarks.peers.adapters.adapter import OnStep, Setup, main

from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm.llm import LLM


class TokenMill:
    """`tokenmill.LLM`, step by step."""

    packages = ("tokenmill", "torch")

    def __init__(self, setup: Setup) -> None:
        quantization = {} if setup.weights == "bf16" else {"quantization": setup.weights}
        self._llm = LLM(
            setup.model,
            dtype="bfloat16",
            num_threads=setup.threads,
            kv_cache_memory_bytes=setup.kv_bytes,
            max_num_seqs=setup.max_batch_size,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            **quantization,
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


if __name__ == "__main__":
    main(TokenMill)
