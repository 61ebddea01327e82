"""Draws the pictures of the documents.

    tokenmill serve --step-log steps.log                     then, after some requests:
    .venv/bin/python tools/draw.py timeline steps.log -o timeline.svg
    .venv/bin/python tools/draw.py all docs/pictures         the three of the documents; records a log of its own
    .venv/bin/python tools/draw.py acceptance build/bf16 build/int8 -o docs/speculation.svg

A timeline shows a column for each step and a lane for each request: what waited, which prompts were cut into chunks,
and which of them shared a step with decodes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.drawing.acceptance import draw_acceptance
from tools.drawing.page_pool import draw_page_pool
from tools.drawing.request import draw_request
from tools.drawing.timeline import draw_timeline, read_timeline

# Prompt, tokens of its answer, and the step before which it comes: two that begin alike, long ones between short ones.
SYSTEM = "You are the miller's helper. Answer in one sentence, and only of what you know. " * 2
ARRIVALS = (
    (SYSTEM + "What is a page?", 12, 0),
    ("What is TokenMill?", 18, 0),
    ("Tell me about the scheduler. " * 9, 9, 3),
    ("Why?", 20, 5),
    (SYSTEM + "What waits?", 11, 9),
    ("How are pages shared? " * 8, 8, 12),
)
ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 8, "num_pages": 64, "max_model_len": 256}


def main() -> int:
    """Draw what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    timeline = commands.add_parser("timeline", help="of a step log")
    timeline.add_argument("log", type=Path)
    timeline.add_argument("-o", "--output", type=Path, default=Path("timeline.svg"))
    acceptance = commands.add_parser("acceptance", help="what benchmarks/speculation.py has measured")
    acceptance.add_argument("results", type=Path, nargs="+")
    acceptance.add_argument("-o", "--output", type=Path, default=Path("speculation.svg"))
    everything = commands.add_parser("all", help="the pictures of the documents")
    everything.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "timeline":
        arguments.output.write_text(draw_timeline(read_timeline(arguments.log)), encoding="utf-8")
        return 0
    if arguments.command == "acceptance":
        arguments.output.write_text(draw_acceptance(arguments.results), encoding="utf-8")
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "steps.log")
        record(log)
        pictures = {
            "timeline": draw_timeline(read_timeline(log)),
            "page-pool": draw_page_pool(),
            "request": draw_request(),
        }
    for name, text in pictures.items():
        (arguments.folder / f"{name}.svg").write_text(text, encoding="utf-8")
    return 0


def record(log: Path) -> None:
    """Answer `ARRIVALS` with the demo model and write every step to `log`."""
    from tokenmill import LLM, SamplingParams

    with LLM(step_log=str(log), **ENGINE) as llm:
        waiting, step = list(ARRIVALS), 0
        outputs = []
        while waiting or not all(output.finished for output in outputs):
            while waiting and waiting[0][2] <= step:
                prompt, max_tokens, _ = waiting.pop(0)
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
                outputs.append(llm.submit(prompt, params))
            llm.step()
            step += 1


if __name__ == "__main__":
    sys.exit(main())
