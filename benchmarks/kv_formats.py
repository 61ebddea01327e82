"""Time the attention of decodes over long contexts by the format of KV, in turns: processor time of one layer.

    python benchmarks/kv_formats.py [--requests 8] [--context 32768] [--heads 16] [--kv-heads 8] [--head-dim 128]

Requests on shuffled pages of 16 tokens, one thread. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.model.kernels.native import load_kernels
from tokenmill.platform.host_arrays import host_array

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.paging import PagedRequests, make_attention

FORMATS = ("bfloat16", "int8", "int8-int4", "int4")
PAGE_SIZE = 16


def main() -> None:
    """Measure all formats and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("requests", 8), ("context", 32_768), ("heads", 16), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    native = load_kernels(1)
    assert native is not None, "the native kernels are not built"
    count, context, size = options.requests, options.context, options.head_dim
    paged = PagedRequests([[0] * context] * count, PAGE_SIZE, np.random.default_rng(0))
    paged.computed = [context - 1] * count
    batch = paged.batch([(request, 1) for request in range(count)])
    spec = AttentionSpec(1, options.heads, options.kv_heads, size)
    angles = torch.outer(torch.arange(context).float(), 1e6 ** -(torch.arange(0, size, 2) / size))
    layer = AttentionLayer(0, size**-0.5, rotary=RotaryTables(angles.cos().bfloat16(), angles.sin().bfloat16()))
    qkv = torch.randn(count, (options.heads + 2 * options.kv_heads) * size).bfloat16()
    ways = {}
    for name in FORMATS:
        wanted = {} if name == "bfloat16" else {"kv_dtype": name}
        attention = make_attention("native", spec, paged.num_pages, PAGE_SIZE, torch.bfloat16, native=native, **wanted)
        for memory in map(host_array, attention.kv.tensors):
            memory[:] = 0.01 if memory.dtype == np.float32 else np.arange(memory.shape[-1]) % 120
        ways[name] = attention, attention.plan(batch)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, (attention, plan) in ways.items():
            before = time.process_time()
            attention.forward(qkv.clone(), layer, plan)
            if number:
                seconds[name].append(time.process_time() - before)
    rows = {
        name: {
            "min_ms": round(min(spent) * 1e3, 2),
            "median_ms": round(statistics.median(spent) * 1e3, 2),
            "of_bfloat16": round(min(seconds["bfloat16"]) / min(spent), 2),
            "bytes": ways[name][0].kv.num_bytes,
        }
        for name, spent in seconds.items()
    }
    for name, row in rows.items():
        print(name, row, file=sys.stderr)
    print(json.dumps({"benchmark": "kv_formats", "isa": native.isa, **vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
