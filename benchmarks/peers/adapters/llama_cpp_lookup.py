r"""llama.cpp with llama-cpp-python's own prompt lookup, on the texts of `benchmarks/speculation.py`, at one stream.

    cd build/peers; PYTHONPATH=../.. venvs/llama-cpp/bin/python -m benchmarks.peers.adapters.llama_cpp_lookup \
        models/gguf/Q8_0.gguf

As there, what the model says is replaced by a trace after all that saying it costs. Each turn with and without; one
line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import llama_cpp
import numpy as np
import numpy.typing as npt
from benchmarks.edited_text import VOCAB_SIZE, texts
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

Drafter = Callable[[npt.NDArray[np.intc]], npt.NDArray[np.intc]]


class OneSequence:
    """A model and the cache of one sequence."""

    def __init__(self, path: str, context_len: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = -(-context_len // 256) * 256
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._batch = llama_cpp.llama_batch_init(context_len, 0, 1)

    def keep(self, num_tokens: int) -> None:
        """Forget all behind the first so many tokens."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, num_tokens, -1)

    def run(self, tokens: list[int], position: int, num_samples: int) -> list[int]:
        """Run tokens from a position on; the most likely token behind each of the last `num_samples`."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place >= len(tokens) - num_samples
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode: {code}")
        places = range(len(tokens) - num_samples, len(tokens))
        logits = (llama_cpp.llama_get_logits_ith(self._context, place) for place in places)
        return [int(np.ctypeslib.as_array(row, (VOCAB_SIZE,)).argmax()) for row in logits]


def say(model: OneSequence, prompt: list[int], trace: list[int], drafter: Drafter | None) -> tuple[float, float]:
    """Tokens a second behind the first, and tokens a step."""
    model.keep(0)
    model.run(prompt, 0, 1)
    text = [*prompt, trace[0]]
    num_steps, began = 0, time.perf_counter()
    while (said := len(text) - len(prompt)) < len(trace):
        left = trace[said:]
        drafts = [] if drafter is None else drafter(np.array(text, dtype=np.intc)).tolist()[: len(left) - 1]
        model.run([text[-1], *drafts], len(text) - 1, 1 + len(drafts))
        equal = next((place for place, draft in enumerate(drafts) if draft != left[place]), len(drafts))
        text += left[: equal + 1]
        model.keep(len(text) - 1)
        num_steps += 1
    return (len(trace) - 1) / (time.perf_counter() - began), (len(trace) - 1) / num_steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", default="edits")
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model = OneSequence(options.model, 2 * options.length + 64, options.threads)
    # Its defaults: n-grams of two tokens, ten drafts.
    drafter = LlamaPromptLookupDecoding()
    off, on = [], []
    for turn in range(options.turns):
        prompt, trace = texts(options.text, 0, options.length, random.Random(turn))
        off.append(say(model, prompt, trace, None))
        on.append(say(model, prompt, trace, drafter))
    ratios = sorted(with_it / without for (without, _), (with_it, _) in zip(off, on, strict=True))
    found = {
        "model": options.model.rpartition("/")[2],
        "text": options.text,
        "off_tokens_s": round(statistics.median(rate for rate, _ in off), 1),
        "tokens_s": round(statistics.median(rate for rate, _ in on), 1),
        "ratio": [round(ratio, 3) for ratio in ratios],
        "tokens_a_step": round(statistics.median(count for _, count in on), 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
