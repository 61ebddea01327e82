"""`tokenmill list`: the models of the hub that are in the cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tokenmill.cli.parser import Parser
from tokenmill.cli.pull import add_cache_flag


def run(arguments: Sequence[str]) -> int:
    """Print a line for each; returns 0."""
    namespace = make_parser().parse(arguments)
    from tokenmill.cli.startup_report import bytes_text
    from tokenmill.machine.hub_cache import cache_folder, cached_models

    cache = cache_folder(namespace.download_dir)
    models = cached_models(cache)
    width = max((len(model.id) for model in models), default=0)
    for model in models:
        state = "unfinished, pull it again" if model.is_unfinished else f"{model.num_revisions} revision(s)"
        used = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        print(f"{model.id:<{width}}  {bytes_text(model.num_bytes):>9}  used {used}  {state}")
    print(f"{bytes_text(sum(model.num_bytes for model in models))} in {len(models)} models of {cache}")
    return 0


def make_parser() -> Parser:
    """The parser of `list`."""
    parser = Parser("list", "The models of the hub that are in the cache.")
    add_cache_flag(parser)
    return parser
