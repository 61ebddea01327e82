"""openvino-genai: its continuous batching pipeline, with the KV format that it chooses (8 bits on CPUs)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from benchmarks.peers.adapters.adapter import OnStep, Setup, main

GIB = 1 << 30


class OpenVINO:
    """`ContinuousBatchingPipeline`, step by step."""

    packages = ("openvino-genai", "openvino")

    def __init__(self, setup: Setup) -> None:
        self._model = Path(setup.model)
        options = {"INFERENCE_NUM_THREADS": setup.threads, "INFERENCE_PRECISION_HINT": "bf16"}
        if setup.texts is not None:  # the pipeline keeps its logits to itself
            compiled = openvino.compile_model(self._model / "openvino_model.xml", "CPU", options)
            self._request = compiled.create_infer_request()
            return
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = max(1, setup.kv_bytes // GIB)
        scheduler.max_num_seqs = setup.max_batch_size
        scheduler.max_num_batched_tokens = 4096
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(setup.model, scheduler, "CPU", options)
        self._ids = itertools.count()

    def prepare(self, batch_size: int, context_len: int) -> None:
        """Nothing: the cache is taken at load."""

    def generate(self, prompts: list[list[int]], num_tokens: int, on_step: OnStep) -> None:
        """As one batch."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            self._pipeline.add_request(next(self._ids), openvino.Tensor(np.array([prompt], np.int64)), config)
            for prompt in prompts
        ]
        counts = [0] * len(handles)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for number, handle in enumerate(handles):
                while handle.can_read():
                    counts[number] += sum(len(output.generated_ids) for output in handle.read().values())
            on_step(counts)

    def logits(self, chunk: list[int]) -> Any:
        """Return those of one pass, KV in the format of the pipeline."""
        self._request.reset_state()
        inputs = {
            "input_ids": np.array([chunk], np.int64),
            "attention_mask": np.ones((1, len(chunk)), np.int64),
            "position_ids": np.arange(len(chunk), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.infer(inputs)
        return np.array(self._request.get_tensor("logits").data[0], np.float32)

    def weight_bytes(self) -> int:
        """Return the size of the weights' file."""
        return (self._model / "openvino_model.bin").stat().st_size


if __name__ == "__main__":
    main(OpenVINO)
