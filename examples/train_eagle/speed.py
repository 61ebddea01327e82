"""Measure how fast one stream answers held-out chats: without drafts, with `suffix`, with a head, with a draft model.

    python -m examples.train_eagle.speed --model smollm2 --head runs/smollm2/head [--draft MODEL] [--quantization int8]

Each question is answered by each way in turn, in one process and on one thread; a rate is tokens by the seconds that
the process has had of a core, prompts included, so neighbours disturb it less than the wall's. Answers are compared.
Drafts are of each length in `--lengths` at most. One line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from typing import Any

from examples.train_eagle.text import held_out_turns
from rich.progress import track

from tokenmill import LLM, SamplingParams

PLAIN = "without drafts"


def ways(arguments: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Return the speculative configuration of each way by its name."""
    found: dict[str, dict[str, Any] | None] = {PLAIN: None, "suffix": {"method": "suffix"}}
    for length in arguments.lengths:
        limit = {"num_speculative_tokens": length}
        found[f"head, {length}"] = {"method": "eagle3", "model": str(arguments.head), **limit}
        if arguments.draft:
            found[f"draft model, {length}"] = {"method": "draft_model", "model": arguments.draft, **limit}
    return found


def answer(llm: LLM, question: str, params: SamplingParams) -> tuple[list[int], float]:
    """Return the tokens of an answer, and the processor seconds that it took."""
    began = time.process_time()
    (output,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), time.process_time() - began


def measure(llms: dict[str, LLM], temperature: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way.

    Raises:
        AssertionError: drafts have changed an answer.
    """
    questions = [turns[0] for turns in held_out_turns()[: arguments.held_out]]
    before = {way: llm.stats() for way, llm in llms.items()}
    rates: dict[str, list[float]] = {way: [] for way in llms}
    for turn in range(arguments.turns):
        tokens, seconds = 0, dict.fromkeys(llms, 0.0)
        for number, question in enumerate(track(questions, f"temperature {temperature}, turn {turn + 1}")):
            params = SamplingParams(temperature=temperature, top_p=1.0, seed=number, max_tokens=arguments.max_tokens)
            answers = {}
            for way, llm in llms.items():
                answers[way], taken = answer(llm, question, params)
                seconds[way] += taken
            assert all(found == answers[PLAIN] for found in answers.values()), "drafts have changed an answer"
            tokens += len(answers[PLAIN])
        for way, found in rates.items():
            found.append(tokens / seconds[way])
    return [row(way, llm, before[way], temperature, rates) for way, llm in llms.items()]


def row(way: str, llm: LLM, before: Any, temperature: float, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians of a way, and the share of its drafts that were right."""
    now = llm.stats()
    tokens = now.generation_tokens - before.generation_tokens
    drafted = now.num_draft_tokens - before.num_draft_tokens
    accepted = now.num_accepted_tokens - before.num_accepted_tokens
    ratios = [one / plain for one, plain in zip(rates[way], rates[PLAIN], strict=True)]
    return {
        "way": way,
        "temperature": temperature,
        "tokens_s": round(statistics.median(rates[way]), 1),
        "times_plain": round(statistics.median(ratios), 3),
        "tokens_a_step": round(tokens / (tokens - accepted), 3),
        "acceptance": round(accepted / drafted, 3) if drafted else None,
    }


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Measure, print and return the rows."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_eagle.speed", description="Measure a head's speed")
    parser.add_argument("--model", default="smollm2", help="a folder, a .gguf file or a name of the catalogue")
    parser.add_argument("--head", required=True, help="folder of the head")
    parser.add_argument("--draft", help="a smaller model of the same tokens")
    parser.add_argument("--quantization", help="format of the model's weights")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4], help="drafts in a row at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--held-out", type=int, help="chats of held_out.txt; all if left out")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of an answer at most")
    parser.add_argument("--max-model-len", type=int, help="tokens of a chat at most, which KV is kept for")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args(words)
    options: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 1, "device": "cpu"}
    options |= {"enable_prefix_caching": False, "quantization": arguments.quantization}
    options |= {"max_model_len": arguments.max_model_len}
    with ExitStack() as stack:
        llms = {
            way: stack.enter_context(LLM(arguments.model, **options, speculative_config=config))
            for way, config in ways(arguments).items()
        }
        rows = [found for temperature in arguments.temperatures for found in measure(llms, temperature, arguments)]
    result = {"model": arguments.model, "quantization": arguments.quantization, "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
