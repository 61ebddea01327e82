"""`tokenmill rm MODEL`: remove models of the hub from the cache."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.cli.pull import add_cache_flag
from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Delete the models and print how much space that frees; returns 0.

    Raises:
        TokenMillError: a model is not in the cache (no model is deleted then), or a file cannot be deleted.
    """
    namespace = make_parser().parse(arguments)
    from tokenmill.core.sizes import size_text
    from tokenmill.model.weights.hub_cache import cache_folder, remove

    print(f"{size_text(remove(cache_folder(namespace.download_dir), namespace.models))} freed")
    return 0


def make_parser() -> Parser:
    """Return the parser of `rm`."""
    parser = Parser("rm", "Delete models of the hub from the cache, with all their revisions.", "MODEL ...")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as `tokenmill list` shows them")
    add_cache_flag(parser)
    return parser
