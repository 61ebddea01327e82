"""`tokenmill fit LOG...`: how long steps take, fitted to step logs, for `tokenmill simulate` and `tokenmill plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenmill.config.parser import Parser
from tokenmill.core.errors import TokenMillError
from tokenmill.core.whole_file import write_whole


def run(arguments: Sequence[str]) -> int:
    """Fit, write and describe the model; returns 0.

    Raises:
        TokenMillError: a file is no step log, there are too few steps, or the model cannot be written.
    """
    namespace = make_parser().parse(arguments)
    write_model(namespace.logs, Path(namespace.output))
    return 0


def write_model(logs: Sequence[Path], output: Path) -> None:
    """Fit a model to the steps of logs, write it and say how good it is.

    Raises:
        TokenMillError: see `run`.
    """
    import msgspec

    from tokenmill.engine.loop.step_log import read_log
    from tokenmill.lab.simulate.step_model import describe, fit, recorded_steps

    steps = []
    for log in logs:
        header, records = read_log(log)
        if header.speculation is not None or header.transfers is not None:
            raise TokenMillError(f"{log}: steps with drafts, or with KV from elsewhere, have times of another kind")
        steps += list(recorded_steps(records))
    model = fit(steps)
    try:
        write_whole(output, msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    except OSError as error:
        raise TokenMillError(f"cannot write {output}: {error.strerror}") from error
    print(describe(model))


def make_parser() -> Parser:
    """The parser of `fit`."""
    parser = Parser("fit", "Fit the time of a step to step logs (serve --step-log FILE).", "LOG...")
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="step logs of one machine, model and flags")
    parser.add_argument("-o", "--output", default="steps.json", metavar="FILE", help="where to (default: %(default)s)")
    return parser
