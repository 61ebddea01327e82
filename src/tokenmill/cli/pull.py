"""`tokenmill pull MODEL`: download a model of the hub or the catalogue into the cache, from which `serve` takes it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Download what is missing and print the folder or file; returns 0.

    Raises:
        TokenMillError: no such model, no access, no connection.
    """
    namespace = make_parser().parse(arguments)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from tokenmill.model.weights.catalogue import CATALOGUE, locate
    from tokenmill.model.weights.hub import gguf_folder
    from tokenmill.model.weights.hub_cache import cache_folder
    from tokenmill.model.weights.hub_pull import pull

    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(namespace.model, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        entry = CATALOGUE.get(namespace.model)
        if entry is not None and entry.hub is None:
            print(locate(entry, gguf_folder(namespace.download_dir), report))
            return 0
        model = namespace.model if entry is None else str(entry.hub)
        folder = pull(model, namespace.revision, cache_folder(namespace.download_dir), report)
    print(folder)
    return 0


def make_parser() -> Parser:
    """Return the parser of `pull`."""
    parser = Parser("pull", "Download a model; files that are in the cache already are kept.", "MODEL")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="owner/name on the hub (HF_TOKEN for what needs an account), or a name of `tokenmill list --catalogue`",
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit (default: the main branch)")
    add_cache_flag(parser)
    return parser


def add_cache_flag(parser: Parser) -> None:
    """Add `--download-dir`, as `serve` has it."""
    default = os.environ.get("TOKENMILL_DOWNLOAD_DIR")
    parser.add_argument("--download-dir", default=default, metavar="DIR", help="the cache (default: the hub's own)")
