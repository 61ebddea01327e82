"""`tokenmill generate`: answer a JSONL file of prompts into a JSONL file, offline, and resumable at any point."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.cli.sampling_flags import add_sampling_flags, sampling_fields
from tokenmill.cli.servers import check_model_is_there
from tokenmill.config.configs import EngineConfig
from tokenmill.config.flags import add_config_file_flag, add_flags, build, check_names, read_given
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.serving.batches.lines import numbered_lines

if TYPE_CHECKING:
    from tokenmill.cli.output_log import OutputLog
    from tokenmill.llm.llm import LLM
    from tokenmill.llm.outputs import RequestOutput

    Answer = Callable[[RequestOutput, str], dict[str, Any]]
    Start = Callable[[int, bytes], tuple[Answer, RequestOutput]]


def run(arguments: Sequence[str]) -> int:
    """Answer every line of the input; lines that cannot be answered get an error line.

    Returns:
        0, or 1 if a line got an error.

    Raises:
        InvalidConfig: a flag or a file that cannot be used.
        TokenMillError: the model cannot be loaded.
    """
    namespace = make_parser().parse(arguments)
    return answer_file(namespace, partial(_starter, sampling_fields(namespace, without="seed")))


def answer_file(namespace: Namespace, starter: Callable[[LLM], Start]) -> int:
    """Answer the lines of `namespace.input` that `namespace.output` does not answer yet; return the exit code.

    Args:
        namespace: of a parser that has the flags of the engine, too.
        starter: makes what starts the job of a line.
    """
    given = read_given(namespace, os.environ)
    check_names(given, (EngineConfig,))
    config = build(EngineConfig, given).resolve()
    source = Path(namespace.input)
    if not source.is_file():
        raise InvalidConfig(f"there is no input file {source}")

    from tokenmill.cli.output_log import OutputLog

    with OutputLog(Path(namespace.output), namespace.overwrite) as log:
        num_lines = _check_answered(source, log)
        if num_lines > len(log.done):
            _answer_all(source, log, config, num_lines, starter)
        log.sort()
    errors = f", {log.num_errors} of them errors" if log.num_errors else ""
    print(f"{namespace.output}: {num_lines} lines{errors}", file=sys.stderr)
    return 1 if log.num_errors else 0


def make_parser() -> Parser:
    """Return the parser of `generate`: files, sampling defaults, and the engine's flags."""
    parser = Parser(
        "generate",
        'Answer a JSONL file offline. A line is {"prompt": ...} or {"messages": ...} with sampling fields, or '
        '{"custom_id": ..., "body": {...}} as in the batches of OpenAI. An interrupted run goes on where it was '
        "when it is started again.",
        "-i FILE -o FILE",
    )
    add_file_flags(parser, "prompt", "answers")
    add_sampling_flags(parser, without="seed")
    add_config_file_flag(parser)
    add_flags(parser, EngineConfig, "engine")
    return parser


def add_file_flags(parser: Parser, asked: str, answers: str) -> None:
    """Add the flags of the files that `answer_file` takes, by what their lines hold."""
    parser.add_argument("--input", "-i", required=True, metavar="FILE", help=f"JSONL file with a {asked} in each line")
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help=f"JSONL file for the {answers}")
    parser.add_argument("--overwrite", action="store_true", help=f"discard the {answers} in the output file")


def _check_answered(source: Path, log: OutputLog) -> int:
    """Count the input's lines, comparing those that have an answer with the lines that were answered.

    Raises:
        InvalidConfig: the output file belongs to another input.
    """
    from tokenmill.cli.batch_io import digest

    count, answered = 0, 0
    for number, _, raw in numbered_lines(source):
        count += 1
        if number in log.done:
            answered += 1
            if log.done[number] != digest(raw):
                raise InvalidConfig(f"line {number} of {source} has changed since it was answered; give --overwrite")
    if answered < len(log.done):
        raise InvalidConfig(f"the output file answers lines that {source} does not have; give --overwrite")
    return count


def _starter(fields: dict[str, Any], llm: LLM) -> Start:
    """Return what starts the job of a line; `fields`: sampling parameters that lines do not give."""
    from tokenmill.cli.batch_io import read_job
    from tokenmill.config.model_files import default_sampling

    defaults = {**default_sampling(Path(llm.info.model)), **fields}

    def start(number: int, raw: bytes) -> tuple[Answer, RequestOutput]:
        job = read_job(number, raw, defaults)
        return job.answer, llm.submit(job.prompt, job.params, job.template_options)

    return start


def _answer_all(
    source: Path, log: OutputLog, config: EngineConfig, num_lines: int, starter: Callable[[LLM], Start]
) -> None:
    """Answer the lines that have no answer, and show how far it is."""
    check_model_is_there(config.model, config.load_format)
    try:
        _answer_lines(source, log, config, num_lines, starter)
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to continue", file=sys.stderr)
        raise


def _answer_lines(
    source: Path, log: OutputLog, config: EngineConfig, num_lines: int, starter: Callable[[LLM], Start]
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tokenmill.config.configs import ServerConfig
    from tokenmill.llm.local import load_llm
    from tokenmill.serving.server.process.launch import served_names

    with (
        load_llm(config) as llm,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        ) as progress,
    ):
        task = progress.add_task("answering", total=num_lines, completed=len(log.done), tokens=0)
        batch = Batch(llm, log, starter(llm), served_names(config, ServerConfig())[0])
        for number, _, raw in numbered_lines(source):
            if number not in log.done:
                batch.add(number, raw)
            while batch.is_full:
                batch.step()
            progress.update(task, completed=len(log.done), tokens=batch.num_tokens)
        while batch.is_open:
            batch.step()
            progress.update(task, completed=len(log.done), tokens=batch.num_tokens)


class Batch:
    """The jobs in progress: enough of them to keep the engine full, never the whole file."""

    def __init__(self, llm: LLM, log: OutputLog, start: Start, name: str) -> None:
        """Keep no job yet; `name` is the model's in replies, as a server of it would have it."""
        self._llm = llm
        self._name = name
        self._log = log
        self._start = start
        self._open: list[tuple[Answer, RequestOutput]] = []
        # Twice what can run: a request that ends is followed by one that is already tokenized.
        self._size = 2 * llm.info.max_num_seqs
        self.num_tokens = 0

    @property
    def is_full(self) -> bool:
        """True while no further job should be added."""
        return len(self._open) >= self._size

    @property
    def is_open(self) -> bool:
        """True while a job is not answered."""
        return bool(self._open)

    def add(self, number: int, raw: bytes) -> None:
        """Start the job of an input line; a line that is no job is answered with its error at once."""
        from tokenmill.cli.batch_io import refused_line

        try:
            self._open.append(self._start(number, raw))
        except InvalidRequest as error:
            self._log.append(refused_line(number, raw, str(error)))
            return
        self._write_finished()

    def step(self) -> None:
        """Run one step of the engine and write the jobs it finished."""
        deltas = self._llm.step()
        self.num_tokens += sum(len(delta.token_ids) for delta in deltas)
        if any(delta.finish_reason is not None for delta in deltas):
            self._write_finished()

    def _write_finished(self) -> None:
        unfinished = []
        for answer, output in self._open:
            if output.finished:
                self._log.append(answer(output, self._name))
            else:
                unfinished.append((answer, output))
        self._open = unfinished
