"""`tokenmill list`: list the models of the hub that are in the cache, or those of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.cli.pull import add_cache_flag
from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Print a line for each model; returns 0."""
    namespace = make_parser().parse(arguments)
    if namespace.catalogue:
        from tokenmill.model.weights.catalogue import table

        print(table())
        return 0
    from tokenmill.model.weights.hub_cache import cache_folder, listing

    print(listing(cache_folder(namespace.download_dir)))
    return 0


def make_parser() -> Parser:
    """Return the parser of `list`."""
    parser = Parser("list", "List the models of the hub that are in the cache.")
    parser.add_argument("--catalogue", action="store_true", help="models that can be served by a short name")
    add_cache_flag(parser)
    return parser
