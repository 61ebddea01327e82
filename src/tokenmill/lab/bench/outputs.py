"""The files that a benchmark writes besides its JSON line: a picture, a table of figures, raw samples."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.lab.bench.figures import write_figures
from tokenmill.lab.bench.plot import Panel, check_plot, draw
from tokenmill.lab.bench.report import print_document
from tokenmill.lab.bench.samples import Sample, write_samples
from tokenmill.lab.bench.title import title


def add_output_flags(parser: Parser) -> None:
    """Add `--plot`, `--csv` and `--samples`."""
    group = parser.add_argument_group("files besides the JSON line")
    group.add_argument("--plot", metavar="FILE", help="draw the figures, e.g. out.png (needs matplotlib)")
    group.add_argument("--csv", metavar="FILE", help="the figures as a table: figure, value, low, high")
    group.add_argument("--samples", metavar="FILE", help="every raw sample, one a line, as .csv or .jsonl")


def check_outputs(namespace: argparse.Namespace) -> None:
    """Refuse outputs that could not be written, before anything is measured.

    Raises:
        InvalidConfig: matplotlib is missing, a name ends with another format, or there is no such folder.
    """
    check_plot(namespace.plot)
    files: dict[Path, str] = {}
    for name, endings in (("plot", ()), ("csv", (".csv",)), ("samples", (".csv", ".jsonl"))):
        flag, path = f"--{name}", getattr(namespace, name)
        if path is None:
            continue
        if endings and not path.endswith(endings):
            raise InvalidConfig(f"{flag}: the name must end with {' or '.join(endings)}, got {path!r}")
        if not Path(path).parent.is_dir():
            raise InvalidConfig(f"{flag}: there is no folder {Path(path).parent}")
        if (other := files.setdefault(Path(path).resolve(), flag)) != flag:
            raise InvalidConfig(f"{flag} and {other} name the same file, {path}")


def write_outputs(
    namespace: argparse.Namespace,
    document: dict[str, Any],
    panels: Callable[[], Sequence[Panel]],
    samples: Iterable[Sample],
) -> None:
    """Write the files that were asked for and the last line of stdout, which is printed even if a file fails.

    Raises:
        TokenMillError: a file cannot be written.
    """
    try:
        if namespace.samples is not None:
            write_samples(namespace.samples, samples)
        if namespace.csv is not None:
            write_figures(namespace.csv, document)
        if namespace.plot is not None:
            draw(namespace.plot, panels(), title(document))
    except OSError as error:
        raise TokenMillError(f"cannot write {error.filename}: {error.strerror}") from None
    finally:
        print_document(document)
