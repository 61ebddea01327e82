"""Time adapters: decode steps of eight streams with none, with one adapter for all, and with one for each.

    python benchmarks/adapters.py [--quantization none,int8,int4] [--rank 16] [--turns 7]

Qwen3-0.6B's shape with random weights on the CPU, adapters on all linears. The cases take turns in one engine. Of
each: the median time of a step in milliseconds with quartiles, and the median quotient to the same turn's base step.
Loading is what an adapter takes from the page cache to its place in memory. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.gpu.folders import QWEN3_0_6B, write_config

from tokenmill.config.configs import EngineConfig
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.adapters.requests import AdapterRequests
from tokenmill.startup.assembly.setup import build_engine

STREAMS, STEPS, CONTEXT = 8, 8, 64


def write_adapter(folder: Path, rank: int) -> Path:
    """An adapter of all linears, random, as PEFT writes it."""
    shape = QWEN3_0_6B
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    linears = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    folder.mkdir()
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (outputs, inputs) in linears.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = (torch.randn(rank, inputs) / 50).bfloat16()
            tensors[f"{module}.lora_B.weight"] = (torch.randn(outputs, rank) / 50).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.split(".")[1] for name in linears]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def step_seconds(engine: Engine, turn: str, adapters: list[AdapterRef | None]) -> float:
    """The mean time of a decode step of requests with these adapters."""
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    ids = [f"{turn} {number}" for number in range(STREAMS)]
    for number, (name, adapter) in enumerate(zip(ids, adapters, strict=True)):
        prompt = [(number * 7919 + place * 104729) % 150_000 for place in range(CONTEXT)]
        engine.add(AddRequest(id=name, prompt_token_ids=prompt, params=params, cache_salt=name, adapter=adapter))
    while any(not engine.scheduler.requests[name].num_output_tokens for name in ids):
        engine.step()
    engine.step()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    took = (time.perf_counter() - began) / STEPS
    engine.abort(ids)
    while engine.has_work:
        engine.step()
    return took


def measure(folder: Path, quantization: str, turns: int) -> list[dict[str, Any]]:
    """The rows of one form of the weights."""
    config = EngineConfig(
        model=str(folder / "model"),
        load_format="dummy",
        device="cpu",
        quantization=quantization,
        enable_lora=True,
        num_pages=256,
        max_num_seqs=STREAMS,
        max_model_len=1024,
        async_scheduling=False,
        weight_cache=False,
    )
    engine = build_engine(config.resolve()).engine
    adapters = engine.extension(AdapterRequests)
    assert adapters is not None, "adapters are on"
    loads, refs = [], []
    for number in range(STREAMS):
        began = time.perf_counter()
        refs.append(adapters.look_at(f"a{number}", str(folder / f"adapter-{number}")))
        loads.append(time.perf_counter() - began)
    cases: dict[str, list[AdapterRef | None]] = {
        "base": [None] * STREAMS,
        "one adapter": [refs[0]] * STREAMS,
        "half base": [None, refs[0]] * (STREAMS // 2),
        "eight adapters": list(refs),
    }
    took: dict[str, list[float]] = {name: [] for name in cases}
    try:
        for turn in range(turns + 1):
            for name, adapters in cases.items():
                seconds = step_seconds(engine, f"{turn} {name}", adapters)
                if turn:
                    took[name].append(seconds)
    finally:
        engine.close()
    rows = []
    for name, own in took.items():
        low, middle, high = (round(1000 * value, 2) for value in statistics.quantiles(own, n=4))
        slower = statistics.median(one / base for one, base in zip(own, took["base"], strict=True))
        row = {"quantization": quantization, "case": name, "ms": [middle, low, high], "to_base": round(slower, 3)}
        print(*(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    rows.append({"quantization": quantization, "case": "load", "ms": round(1000 * statistics.median(loads), 1)})
    print(rows[-1])
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quantization", default="none,int8,int4")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_config(folder / "model", QWEN3_0_6B)
        for number in range(STREAMS):
            write_adapter(folder / f"adapter-{number}", options.rank)
        rows = [row for one in options.quantization.split(",") for row in measure(folder, one, options.turns)]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
