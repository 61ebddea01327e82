"""What a grammar costs: seconds per token of answers with a JSON schema and of free text, one after the other.

    python benchmarks/structured.py [--batch 1 16] [--tokens 200] [--repeats 5] [--model FOLDER]

Both kinds are made to run to the same number of tokens. The least of the repeats counts: what else the machine does
only adds to it. Prints a JSON line for each batch size.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

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


def seconds_per_token(llm: LLM, batch: int, params: SamplingParams) -> float:
    """Of one run of `batch` prompts."""
    prompts = [f"Item {number}: tell me more about it." for number in range(batch)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_progress_bar=False)
    seconds = time.perf_counter() - started
    return seconds / sum(len(output.outputs[0].token_ids) for output in outputs)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    free = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=0)
    structured = SamplingParams(max_tokens=args.tokens, seed=0, structured_outputs=StructuredOutputs(json=SCHEMA))
    with LLM(args.model) as llm:
        for batch in args.batch:
            runs: dict[str, list[float]] = {"free": [], "structured": []}
            for _ in range(args.repeats + 1):  # the first is not counted: it compiles the grammar
                runs["free"].append(seconds_per_token(llm, batch, free))
                runs["structured"].append(seconds_per_token(llm, batch, structured))
            best = {name: min(seconds[1:]) for name, seconds in runs.items()}
            micros = {f"{name}_us_per_token": round(value * 1e6, 1) for name, value in best.items()}
            print(json.dumps({"batch": batch, **micros, "ratio": round(best["structured"] / best["free"], 3)}))


if __name__ == "__main__":
    main()
