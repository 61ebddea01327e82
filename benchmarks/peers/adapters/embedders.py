"""Engines that turn texts into vectors, each in a process of its own that is asked over a pipe.

    python -m benchmarks.peers.adapters.embedders ENGINE PRECISION FILE THREADS

A line of JSON on the standard input has texts; the answer is a line with the seconds they took, on the wall and of this
process's processors. Texts that are a warm-up are answered with their vectors, of length 1: engines that take texts in
batches are tried with some sizes of these, and keep the fastest.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

# Tokens that llama.cpp runs at once: attention is over all of them, so few are fast where texts are short.
CALL_TOKENS = (64, 128, 256, 512)
BATCH_SIZES = (4, 8, 16, 32)
MAX_TEXT_TOKENS = 512


class Embedder(Protocol):
    """An engine, loaded.

    Attributes:
        sizes: batch sizes to choose from.
        size: the one that is used.
    """

    sizes: tuple[int, ...]
    size: int

    def embed(self, texts: list[str]) -> Any:
        """Return [texts, hidden] in float32."""


class TokenMill:
    """`LLM.embed`."""

    sizes, size = (0,), 0

    def __init__(self, precision: str, file: str, threads: int) -> None:
        from tokenmill import LLM

        is_int8 = precision == "int8"
        dtype = "bfloat16" if is_int8 else precision
        self._llm = LLM(file, dtype=dtype, quantization="int8" if is_int8 else "none", num_threads=threads)

    def embed(self, texts: list[str]) -> Any:
        """All at once."""
        return np.array([one.outputs.embedding for one in self._llm.embed(texts, use_tqdm=False)], np.float32)


class SentenceTransformers:
    """`SentenceTransformer.encode`, which sorts texts by length."""

    sizes, size = BATCH_SIZES, 32

    def __init__(self, precision: str, file: str, threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(file, device="cpu").to(getattr(torch, precision))
        self._model.max_seq_length = MAX_TEXT_TOKENS

    def embed(self, texts: list[str]) -> Any:
        """In its own batches."""
        return self._model.encode(texts, batch_size=self.size, show_progress_bar=False)


class OnnxRuntime:
    """ONNX Runtime as Text Embeddings Inference uses it: all optimizations, texts of about one length together."""

    sizes, size = BATCH_SIZES, 8

    def __init__(self, precision: str, file: str, threads: int) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            f"{file}/{precision}.onnx", options, providers=["CPUExecutionProvider"]
        )
        self._tokenizer = Tokenizer.from_file(f"{file}/tokenizer.json")
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TEXT_TOKENS)

    def embed(self, texts: list[str]) -> Any:
        """In batches of so many, padded to the longest."""
        encoded = [one.ids for one in self._tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(texts)), key=lambda at: -len(encoded[at]))
        found: list[Any] = [None] * len(texts)
        for first in range(0, len(order), self.size):
            batch = order[first : first + self.size]
            ids = np.zeros((len(batch), len(encoded[batch[0]])), np.int64)
            mask = np.zeros_like(ids)
            for row, at in enumerate(batch):
                ids[row, : len(encoded[at])], mask[row, : len(encoded[at])] = encoded[at], 1
            (states,) = self._session.run(None, {"input_ids": ids, "attention_mask": mask})
            weights = mask[:, :, None] / mask.sum(1)[:, None, None]
            for at, vector in zip(batch, unit((states * weights).sum(1)), strict=True):
                found[at] = vector
        return np.array(found, np.float32)


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level API: texts that fit into a call run in it together."""

    sizes, size = CALL_TOKENS, 512

    def __init__(self, precision: str, file: str, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(f"{file}/{precision}.gguf".encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {precision}.gguf")
        self._vocab, self._threads = llama_cpp.llama_model_get_vocab(self._model), threads
        self._hidden, self._context, self._made = llama_cpp.llama_model_n_embd(self._model), None, 0
        self._batch = llama_cpp.llama_batch_init(MAX_TEXT_TOKENS, 0, 1)

    def embed(self, texts: list[str]) -> Any:
        """In the order of the texts, pooled and at length 1."""
        encoded = [self._ids(text) for text in texts]
        room = max(self.size, *map(len, encoded))
        if self._made != room:
            self._make_context(room)
        return unit(np.concatenate([self._run(group) for group in _groups(encoded, room)]))

    def _ids(self, text: str) -> list[int]:
        data, tokens = text.encode(), (self._api.llama_token * MAX_TEXT_TOKENS)()
        count = self._api.llama_tokenize(self._vocab, data, len(data), tokens, MAX_TEXT_TOKENS, True, True)
        return list(tokens[:count])

    def _make_context(self, room: int) -> None:
        api = self._api
        if self._context is not None:
            api.llama_free(self._context)
        parameters = api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = room
        parameters.n_seq_max = MAX_TEXT_TOKENS // 8
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.embeddings, parameters.pooling_type = True, api.LLAMA_POOLING_TYPE_MEAN
        parameters.kv_unified = True
        self._context, self._made = api.llama_init_from_model(self._model, parameters), room
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {room} tokens")

    def _run(self, group: list[list[int]]) -> Any:
        batch, place = self._batch, 0
        for sequence, ids in enumerate(group):
            for position, token in enumerate(ids):
                batch.token[place], batch.pos[place], batch.logits[place] = token, position, True
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
                place += 1
        batch.n_tokens = place
        if (code := self._api.llama_encode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_encode: {code}")
        floats = ctypes.POINTER(ctypes.c_float * self._hidden)
        return np.stack(
            [
                np.array(
                    ctypes.cast(self._api.llama_get_embeddings_seq(self._context, sequence), floats).contents,
                    np.float32,
                )
                for sequence in range(len(group))
            ]
        )


def _groups(encoded: list[list[int]], room: int) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    for ids in encoded:
        if group and sum(map(len, group)) + len(ids) > room:
            yield group
            group = []
        group.append(ids)
    yield group


def unit(vectors: Any) -> Any:
    """Return vectors at length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


ENGINES: dict[str, type[Embedder]] = {
    "TokenMill": TokenMill,
    "sentence-transformers": SentenceTransformers,
    "onnxruntime": OnnxRuntime,
    "llama.cpp": LlamaCpp,
}


def timed(engine: Embedder, texts: list[str]) -> dict[str, float]:
    """Return the seconds that vectors take."""
    wall, processor = time.perf_counter(), time.process_time()
    engine.embed(texts)
    return {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}


def warm_up(engine: Embedder, texts: list[str]) -> dict[str, Any]:
    """Choose a size, by the faster of two runs of each; return it with the vectors."""
    seconds = {}
    for size in engine.sizes:
        engine.size = size
        engine.embed(texts)
        seconds[size] = min(timed(engine, texts)["seconds"] for _ in range(2))
    engine.size = min(seconds, key=seconds.__getitem__)
    return {"size": engine.size, "vectors": unit(np.asarray(engine.embed(texts), np.float32)).tolist()}


def main() -> None:
    """Answer until the input ends."""
    # Whatever libraries print goes where errors go.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, precision, file, threads = sys.argv[1:]
    engine = ENGINES[name](precision, file, int(threads))
    for line in sys.stdin:
        asked = json.loads(line)
        answer = (warm_up if asked["is_warm_up"] else timed)(engine, asked["texts"])
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
