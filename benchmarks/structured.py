"""What a grammar costs: seconds per token of answers with a JSON schema and of free text, one after the other.

    python benchmarks/structured.py [--batch 1 16] [--tokens 200] [--repeats 15] [--model FOLDER]

Both kinds are made to run to the same number of tokens, in pairs: the ratio is the median over the pairs, so that what
else the machine does meets both alike. `cpu` is the processor time of the whole process, threads of masks included.
Prints a JSON line for each batch size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any, NamedTuple

from tokenmill import LLM, SamplingParams
from tokenmill.structured.outputs import StructuredOutputs

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["person", "animal", "place"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}


class Cost(NamedTuple):
    """Microseconds per token of one run."""

    wall: float
    cpu: float


def cost_of(llm: LLM, batch: int, params: SamplingParams) -> Cost:
    """Of one run of `batch` prompts."""
    prompts = [f"Item {number}: tell me more about it." for number in range(batch)]
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_progress_bar=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Cost(1e6 * wall / num_tokens, 1e6 * cpu / num_tokens)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    free = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=0)
    structured = SamplingParams(max_tokens=args.tokens, seed=0, structured_outputs=StructuredOutputs(json=SCHEMA))
    with LLM(args.model) as llm:
        for batch in args.batch:
            for params in (free, structured):  # not counted: it compiles the grammar
                cost_of(llm, batch, params)
            pairs = [(cost_of(llm, batch, free), cost_of(llm, batch, structured)) for _ in range(args.repeats)]
            print(json.dumps({"batch": batch, **_summary(pairs), "load": round(os.getloadavg()[0], 1)}))


def _summary(pairs: list[tuple[Cost, Cost]]) -> dict[str, float]:
    summary = {}
    for clock in Cost._fields:
        free, structured = ([getattr(one, clock) for one in side] for side in zip(*pairs, strict=True))
        summary[f"{clock}_ratio"] = round(statistics.median(b / a for a, b in zip(free, structured, strict=True)), 3)
        summary[f"free_{clock}_us"] = round(min(free), 1)
        summary[f"structured_{clock}_us"] = round(min(structured), 1)
    return summary


if __name__ == "__main__":
    main()
