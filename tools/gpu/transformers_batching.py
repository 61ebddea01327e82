"""The offline recipe by transformers' own continuous batching, where it is installed: what a user has without us."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

Work = list[tuple[list[int], int]]
"""Prompts, and how many tokens each gets."""


def measure(model_name: str, folder: Path, platform: Any, work: Work, until: float) -> dict[str, Any]:
    """Run the work once on random weights; the row of the report.

    Args:
        until: by `time.monotonic`, when it is given up.

    Raises:
        RuntimeError: a request failed, the loop ended, or the time is up.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if platform.name == "cuda" else torch.float32
    with torch.device(platform.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    longest = max(count for _, count in work)
    generation = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0
    )
    with torch.no_grad(), model.continuous_batching_context_manager(generation_config=generation) as manager:
        start = time.perf_counter()
        for number, (prompt, count) in enumerate(work):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=count)
        tokens, unfinished = 0, len(work)
        while unfinished:
            if time.monotonic() > until:
                raise RuntimeError(f"{unfinished} sequences were not done in time")
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                if output.error is not None:
                    raise RuntimeError(output.error)
                tokens, unfinished = tokens + len(output.generated_tokens), unfinished - 1
            elif output is None and not manager.is_running():
                raise RuntimeError("transformers' loop has ended")
        seconds = time.perf_counter() - start
    row = {"model": model_name, "what": f"the recipe by transformers {transformers.__version__}, {len(work)} sequences"}
    return {**row, "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
