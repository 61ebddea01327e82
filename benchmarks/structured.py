"""Measure the cost of a grammar: seconds per token of answers with a JSON schema and of free text, one after the other.

    python benchmarks/structured.py [--batch 1 16] [--temperature 0 1] [--repeats 25] [--model FOLDER]

Two cases. `asked`: the prompt asks for JSON of that form, so that the model writes much the same with the schema and
without: what a user has. `imposed`: the prompt asks for nothing of the kind, and the schema makes the model write what
it would not: the worst that a grammar can do. Free text is made to run to the same number of tokens.

Both kinds run in pairs: the ratio is the median over the pairs, so that what else the machine does meets both alike.
`cpu` is the processor time of the whole process, threads of masks included. Prints a JSON line for each case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from typing import Any, NamedTuple

from tokenmill import LLM, SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
}
THINGS: dict[str, Any] = {
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
NAMES = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena", "Milo", "Nora", "Otto")
CITIES = ("Lisbon", "Paris", "Oslo", "Rome", "Cairo", "Lima", "Delhi", "Quito")


class Case(NamedTuple):
    """A question to the model, `{name}`, `{age}` and `{city}` aside, and the form of the answer."""

    prompt: str
    schema: dict[str, Any]
    max_tokens: int


CASES = {
    "asked": Case(
        f"Turn this sentence into JSON: {{name}} is {{age}} years old and lives in {{city}}.\n"
        f"Schema: {json.dumps(PERSON).replace('{', '{{').replace('}', '}}')}",
        PERSON,
        60,
    ),
    "imposed": Case("Item {age}: tell me more about {name} from {city}.", THINGS, 200),
}


class Cost(NamedTuple):
    """Microseconds per token of one run."""

    wall: float
    cpu: float


def cost_of(llm: LLM, case: Case, batch: int, params: SamplingParams) -> Cost:
    """Of one run of `batch` prompts."""
    texts = [
        case.prompt.format(name=NAMES[index % len(NAMES)], age=20 + index, city=CITIES[index % len(CITIES)])
        for index in range(batch)
    ]
    chats = [[{"role": "user", "content": text}] for text in texts]
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = llm.chat(chats, params, use_tqdm=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Cost(1e6 * wall / num_tokens, 1e6 * cpu / num_tokens)


def measure(llm: LLM, name: str, batch: int, temperature: float, repeats: int) -> dict[str, Any]:
    """One case in pairs of runs."""
    case = CASES[name]
    free = SamplingParams(max_tokens=case.max_tokens, seed=0, temperature=temperature, ignore_eos=name == "imposed")
    outputs = StructuredOutputs(json=case.schema)
    structured = SamplingParams(max_tokens=case.max_tokens, seed=0, temperature=temperature, structured_outputs=outputs)
    for params in (free, structured):  # not counted: it compiles the grammar
        cost_of(llm, case, batch, params)
    pairs = [(cost_of(llm, case, batch, free), cost_of(llm, case, batch, structured)) for _ in range(repeats)]
    what = {"case": name, "batch": batch, "temperature": temperature}
    return {**what, **_summary(pairs), "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    with LLM(args.model) as llm:
        for name, batch, temperature in itertools.product(CASES, args.batch, args.temperature):
            print(json.dumps(measure(llm, name, batch, temperature, args.repeats)), flush=True)


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
