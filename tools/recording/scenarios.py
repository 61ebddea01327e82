"""Scenarios: a model, the options of an engine and a kind of traffic, all drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.recording.checkpoints import FAMILIES, STORED

CONTEXT = 160
NATIVE = {"dtype": "bfloat16", "kernels": "native"}
COMPUTE: dict[str, dict[str, Any]] = {
    "native": NATIVE,
    "native-int8": {**NATIVE, "quantization": "int8"},
    "native-int4": {**NATIVE, "quantization": "int4"},
    "native-kv-int8": {**NATIVE, "kv_cache_dtype": "int8"},
    "native-cpu-attention": {**NATIVE, "attention_backend": "cpu"},
    "torch-bf16": {"dtype": "bfloat16", "kernels": "torch"},
    "torch-fp16": {"dtype": "float16", "kernels": "torch"},
    "torch-fp32": {"dtype": "float32"},
    "reference": {"dtype": "float32", "attention_backend": "reference"},
}
POLICIES = ("fair", "fcfs", "priority")
BATCH_POLICIES = ("mixed", "prefill-first")
ADMISSIONS = ("whole-prompt", "optimistic", "reserve")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests and settings that are recorded in one file.

    Attributes:
        model: a name of `checkpoints.MODELS`.
        options: of `LLM`.
        grammars: requests come with grammars. A mask may be late, so plans depend on the clock and are left out.
    """

    name: str
    model: str
    options: dict[str, Any]
    grammars: bool = False


def scenarios(seed: int) -> list[Scenario]:
    """All of them: families by ways to compute, stored formats, policies, grammars."""
    return [
        Scenario(name, model, _options(f"{seed} {name}", fixed), grammars) for name, model, fixed, grammars in _all()
    ]


def _all() -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    for model in FAMILIES:
        for compute, fixed in COMPUTE.items():
            yield f"{model}.{compute}", model, fixed, False
    for model in STORED:
        for compute in ("native", "torch-fp32"):
            yield f"{model}.{compute}", model, COMPUTE[compute], False
    for policy in POLICIES:
        for batch_policy in BATCH_POLICIES:
            for admission in ADMISSIONS:
                names = {"scheduling_policy": policy, "batch_policy": batch_policy, "admission": admission}
                for overlap in (False, True):
                    name = ".".join(["policies", policy, batch_policy, admission, "overlap" if overlap else "inline"])
                    yield name, "qwen3", {**COMPUTE["native"], **names, "async_scheduling": overlap}, False
    for overlap in (False, True):
        for compute in ("native", "torch-fp32"):
            for rows in (1, 6):
                name = f"grammars.{compute}.{rows}-rows.{'overlap' if overlap else 'inline'}"
                fixed = {**COMPUTE[compute], "max_num_seqs": rows, "async_scheduling": overlap}
                yield name, "llama", fixed, True


def _options(seed: str, fixed: dict[str, Any]) -> dict[str, Any]:
    """The options that are fixed, and the others drawn: few pages and small budgets, so that requests are preempted."""
    rng = random.Random(seed)
    chunked = rng.random() < 0.8
    page_size = rng.choice((16, 32)) if fixed.get("kernels") == "native" else rng.choice((1, 4, 8, 16))
    options: dict[str, Any] = {
        "max_model_len": CONTEXT,
        "page_size": page_size,
        "num_pages": round(CONTEXT / page_size * rng.uniform(1, 3)),
        "max_num_seqs": rng.choice((2, 4, 8)),
        "max_num_batched_tokens": rng.choice((8, 16, 33, 64)) if chunked else CONTEXT,
        "long_prefill_token_threshold": rng.choice((0, 0, 7)),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.75,
        "scheduling_policy": rng.choice(POLICIES),
        "batch_policy": rng.choice(BATCH_POLICIES),
        "admission": rng.choice(ADMISSIONS),
        "async_scheduling": rng.random() < 0.4,
        "seed": rng.randrange(1000),
    }
    return options | {"device": "cpu", "num_threads": 1} | fixed
