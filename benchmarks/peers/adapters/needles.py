"""Engines that look for needles in a text of token ids: a line of JSON asks, a line answers.

    python -m benchmarks.peers.adapters.needles llama.cpp q8_0 MODEL CONTEXT THREADS

Asked `{"text": [...], "keys": [...], "num_values": n}`, an engine computes the text, and for each key behind it the n
likeliest tokens in turn; it answers with the seconds of the text, those of all later tokens, and the values.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any, Protocol

import numpy as np

CHUNK = 2048  # most tokens of a step


class Finder(Protocol):
    """An engine with one KV cache."""

    def compute(self, text: list[int]) -> None:
        """Compute a text, and keep its KV."""

    def values(self, text: list[int], key: int, count: int) -> list[int]:
        """Return the likeliest tokens behind the text and a key."""


class TokenMill:
    """`Engine`, with prefix cache."""

    def __init__(self, kv: str, model: str, context: int, threads: int) -> None:
        from tokenmill.config.configs import EngineConfig
        from tokenmill.startup.assembly.setup import build_engine

        config = EngineConfig(
            model=model,
            device="cpu",
            num_threads=threads,
            max_num_seqs=1,
            max_model_len=context + 64,
            max_num_batched_tokens=CHUNK,
            kv_cache_dtype=kv,
            num_pages=2 * context // 16,
        )
        built = build_engine(config.resolve())
        for _ in built.idle_work:
            pass  # the memory of KV is taken
        self._engine = built.engine

    def compute(self, text: list[int]) -> None:
        """As a prompt, with one token behind it."""
        self._run(text, 1)

    def values(self, text: list[int], key: int, count: int) -> list[int]:
        """As a prompt that the prefix cache has."""
        return self._run([*text, key], count)

    def _run(self, prompt: list[int], count: int) -> list[int]:
        from tokenmill.core.messages import AddRequest
        from tokenmill.core.sampling_params import SamplingParams

        params, found = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count), []
        self._engine.add(AddRequest(id=str(time.perf_counter_ns()), prompt_token_ids=prompt, params=params))
        while len(found) < count:
            found += [token for output in self._engine.step() for token in output.token_ids]
        return found


class LlamaCpp:
    """`llama_decode` on one sequence, with flash attention, without which values are not quantized."""

    def __init__(self, kv: str, model: str, context: int, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = -(-(context + 64) // 256) * 256, CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = getattr(llama_cpp, f"GGML_TYPE_{kv.upper()}")
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {kv}")
        self._size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def compute(self, text: list[int]) -> None:
        """From an empty cache."""
        self._forget(0)
        for start in range(0, len(text), CHUNK):
            self._decode(text[start : start + CHUNK])

    def values(self, text: list[int], key: int, count: int) -> list[int]:
        """Behind the text, whatever was asked before."""
        self._forget(len(text))
        found = [self._decode([key])]
        while len(found) < count:
            found.append(self._decode(found[-1:]))
        return found

    def _forget(self, first: int) -> None:
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), 0, first, -1)

    def _decode(self, tokens: list[int]) -> int:
        ids = (self._api.llama_token * len(tokens))(*tokens)
        if code := self._api.llama_decode(self._context, self._api.llama_batch_get_one(ids, len(tokens))):
            raise RuntimeError(f"llama_decode: {code}")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._size))
        return int(np.frombuffer(address.contents, np.float32).argmax())


ENGINES: dict[str, Any] = {"TokenMill": TokenMill, "llama.cpp": LlamaCpp}


def answer(finder: Finder, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the values, and how long the text and they took."""
    began = time.perf_counter()
    finder.compute(asked["text"])
    computed = time.perf_counter()
    values = [finder.values(asked["text"], key, asked["num_values"]) for key in asked["keys"]]
    return {"text_s": computed - began, "values_s": time.perf_counter() - computed, "values": values}


def main() -> None:
    """Answer until there are no more lines."""
    engine, kv, model, context, threads = sys.argv[1:]
    finder: Finder = ENGINES[engine](kv, model, int(context), int(threads))
    for line in sys.stdin:
        print(json.dumps(answer(finder, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
