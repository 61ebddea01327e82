"""`tokenmill pull MODEL`: download a model of the hub into the cache, from which `serve` takes it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Download what is missing and print the folder; returns 0.

    Raises:
        TokenMillError: no such model, no access, no connection.
    """
    namespace = make_parser().parse(arguments)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from tokenmill.model.weights.hub_cache import cache_folder
    from tokenmill.model.weights.hub_pull import pull

    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(namespace.model, total=None)
        folder = pull(
            namespace.model,
            namespace.revision,
            cache_folder(namespace.download_dir),
            lambda done, total: bar.update(task, completed=done, total=total or None),
        )
    print(folder)
    return 0


def make_parser() -> Parser:
    """Return the parser of `pull`."""
    parser = Parser("pull", "Download a model of the hub; files that are in the cache already are kept.", "MODEL")
    parser.add_argument("model", metavar="MODEL", help="owner/name on the hub (HF_TOKEN for what needs an account)")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit (default: the main branch)")
    add_cache_flag(parser)
    return parser


def add_cache_flag(parser: Parser) -> None:
    """Add `--download-dir`, as `serve` has it."""
    default = os.environ.get("TOKENMILL_DOWNLOAD_DIR")
    parser.add_argument("--download-dir", default=default, metavar="DIR", help="the cache (default: the hub's own)")
