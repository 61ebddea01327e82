"""`tokenmill embed`: turn a JSONL file of texts into a JSONL file of vectors, offline, and resumable at any point."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenmill.cli.generate import add_file_flags, answer_file
from tokenmill.config.configs import EngineConfig
from tokenmill.config.flags import add_config_file_flag, add_flags
from tokenmill.config.parser import Parser

if TYPE_CHECKING:
    from tokenmill.cli.generate import Answer, Start
    from tokenmill.llm.llm import LLM
    from tokenmill.llm.outputs import RequestOutput


def run(arguments: Sequence[str]) -> int:
    """Embed every line of the input; lines that cannot be embedded get an error line.

    Returns:
        0, or 1 if a line got an error.

    Raises:
        InvalidConfig: a flag or a file that cannot be used.
        TokenMillError: the model cannot be loaded.
    """
    namespace = make_parser().parse(arguments)
    return answer_file(namespace, partial(_starter, namespace))


def make_parser() -> Parser:
    """Return the parser of `embed`: files, the form of vectors, and the engine's flags."""
    parser = Parser(
        "embed",
        'Embed a JSONL file offline. A line is {"text": ...}, {"input": ...} or {"prompt": ...}, a text or token ids, '
        'with an optional "id", or {"custom_id": ..., "body": {"input": ...}} as in the batches of OpenAI. An '
        "interrupted run goes on where it was when it is started again.",
        "-i FILE -o FILE",
    )
    add_file_flags(parser, "text", "vectors")
    parser.add_argument("--dimensions", type=int, metavar="N", help="numbers of a vector, if the model's may be cut")
    parser.add_argument("--prompt-name", metavar="NAME", help="one of the model's own prompts goes before each text")
    parser.add_argument("--raw", action="store_true", help="leave vectors at their own length")
    add_config_file_flag(parser)
    add_flags(parser, EngineConfig, "engine")
    return parser


def _starter(namespace: Namespace, llm: LLM) -> Start:
    """Return what starts the embedding of a line."""
    from tokenmill.cli.embed_lines import answer, read_text

    options: dict[str, Any] = {
        "dimensions": namespace.dimensions,
        "prompt_name": namespace.prompt_name,
        "normalize": not namespace.raw,
    }

    def start(number: int, raw: bytes) -> tuple[Answer, RequestOutput]:
        line = read_text(number, raw)
        return partial(answer, line), llm.submit_embedding(line.text, **options)

    return start
