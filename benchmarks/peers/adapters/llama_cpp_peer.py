"""llama.cpp through llama-cpp-python's low-level API: `llama_decode` over several sequences at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import llama_cpp
import numpy as np
from benchmarks.peers.adapters.adapter import OnStep, Setup, main

# llama.cpp's default, the most tokens of one call.
MAX_BATCH_TOKENS = 2048
# Context sizes are rounded up to this.
CONTEXT_STEP = 256


class LlamaCpp:
    """A GGUF model, and a context made anew for each shape of batch."""

    packages = ("llama-cpp-python",)

    def __init__(self, setup: Setup) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(setup.model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {setup.model}")
        self._threads = setup.threads
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context = None
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

    def prepare(self, batch_size: int, context_len: int) -> None:
        """Each sequence gets a cache of its own, so that attention reads no other's."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = batch_size * -(-context_len // CONTEXT_STEP) * CONTEXT_STEP
        params.n_seq_max = batch_size
        params.n_batch = MAX_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {batch_size} x {context_len} tokens")

    def generate(self, prompts: list[list[int]], num_tokens: int, on_step: OnStep) -> None:
        """As one batch; a prompt is not split over calls of `llama_decode`."""
        newest = [0] * len(prompts)
        counts = [0] * len(prompts)
        for group in self._groups(prompts):
            tokens = [
                (token, position, number, position == len(prompts[number]) - 1)
                for number in group
                for position, token in enumerate(prompts[number])
            ]
            self._draw(tokens, newest)
            for number in group:
                counts[number] = 1
            on_step(counts)
        for step in range(1, num_tokens):
            tokens = [(token, len(prompts[number]) + step - 1, number, True) for number, token in enumerate(newest)]
            self._draw(tokens, newest)
            on_step([step + 1] * len(prompts))

    def logits(self, chunk: list[int]) -> Any:
        """In one call."""
        rows = np.empty((len(chunk), self._vocab_size), np.float32)
        for position, found in self._decode([(token, position, 0, True) for position, token in enumerate(chunk)]):
            rows[position] = found
        return rows

    def weight_bytes(self) -> int:
        """Return what the model says."""
        return int(llama_cpp.llama_model_size(self._model))

    def _groups(self, prompts: list[list[int]]) -> Iterable[range]:
        """Prompts that fit into one call each."""
        start = total = 0
        for number, prompt in enumerate(prompts):
            if total + len(prompt) > MAX_BATCH_TOKENS:
                yield range(start, number)
                start, total = number, 0
            total += len(prompt)
        yield range(start, len(prompts))

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> Iterator[tuple[int, Any]]:
        """Run (token, position, sequence, wants logits); yields the place and the logits of each that wants them."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, (token, position, sequence, is_wanted) in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = is_wanted
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode: {code}")
        for place, (_, _, _, is_wanted) in enumerate(tokens):
            if is_wanted:
                logits = llama_cpp.llama_get_logits_ith(self._context, place)
                address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab_size))
                yield place, np.frombuffer(address.contents, np.float32)

    def _draw(self, tokens: list[tuple[int, int, int, bool]], newest: list[int]) -> None:
        """Run the tokens, and put the most likely next ones into `newest`."""
        for place, logits in self._decode(tokens):
            newest[tokens[place][2]] = int(logits.argmax())


if __name__ == "__main__":
    main(LlamaCpp)
