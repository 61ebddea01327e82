"""`tokenmill serve [MODEL]`: read the flags, show the start, and leave the rest to `serving.server.process.launch`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tokenmill.cli.servers import absolute_source, check_model_is_there, servers_folder
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.flags import add_config_file_flag, add_grouped_flags, build, check_names, read_given
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig
from tokenmill.ipc.server_registry import registered

NODE_MODULE = "tokenmill.startup.ranks.node"
"""The command of all machines but the one that serves."""


def run(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C; returns the exit code.

    Raises:
        TokenMillError: the flags, the checkpoint or the machine do not allow it.
    """
    engine, server = read_configs(arguments, os.environ)
    if server.models_dir is not None or server.models is not None:
        from tokenmill.cli import serve_models

        return serve_models.run(engine, server)
    if server.encoder_only:
        return _serve_encoder(engine, server)
    if engine.node_rank > 0:
        # It only waits and starts processes: this one becomes it.
        given = [msgspec.json.encode(engine).decode(), str(server.data_parallel_size)]
        from tokenmill.ipc.python_child import become_python

        become_python(["-m", NODE_MODULE, *given])
    check_model_is_there(engine.model, engine.load_format)
    from tokenmill.cli.startup import open_screen
    from tokenmill.serving.server.process import launch

    bound = dataclasses.replace(server, served_model_name=launch.served_names(engine, server))

    @contextlib.contextmanager
    def announce(config: ServerConfig, url: str) -> Iterator[None]:
        nonlocal bound
        bound = config
        with contextlib.ExitStack() as stack:
            # A server that `ps` cannot show is a server all the same.
            with contextlib.suppress(InvalidConfig):
                place, source = url + config.root_path, absolute_source(engine.model)
                stack.enter_context(registered(servers_folder(), place, config.served_model_name, source))
            yield

    return launch.run(engine, bound, lambda: open_screen(sys.stderr, bound), announce=announce)


def _serve_encoder(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve the encoder of images or sound alone."""
    from tokenmill.serving.server.encoder import serve_encoder
    from tokenmill.startup.assembly.encoder_alone import load_encoder_alone

    check_model_is_there(engine.model)
    encode, what = load_encoder_alone(engine)

    def announce(url: str) -> None:
        print(f"{url} {what}; Ctrl-C ends it", file=sys.stderr, flush=True)

    return serve_encoder(encode, server, announce)


def read_configs(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[EngineConfig, ServerConfig]:
    """Return the resolved configs that flags, environment and config file ask for.

    Raises:
        InvalidConfig: a value, or a combination of values, that cannot work.
        SystemExit: with code 2, an unknown flag; with 0 after --help.
    """
    parser = make_parser()
    namespace = parser.parse(arguments)
    given = read_given(namespace, environment)
    check_names(given, (EngineConfig, ServerConfig))
    engine, server = build(EngineConfig, given), build(ServerConfig, given)
    if namespace.positional_model is not None:
        if "model" in namespace and namespace.model != namespace.positional_model:
            parser.error(f"two models: {namespace.positional_model} and --model {namespace.model}")
        engine = dataclasses.replace(engine, model=namespace.positional_model)
    return engine.resolve(), server.resolve()


def make_parser() -> Parser:
    """Return the parser of `serve`: one flag for each config field."""
    parser = Parser(
        "serve",
        "Serve a model over HTTP with an OpenAI-compatible API. Every flag can also be given as TOKENMILL_<FLAG>, "
        "e.g. TOKENMILL_PORT=8001, or as a key of the --config file.",
        "[MODEL]",
    )
    parser.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        help="checkpoint folder or hub id (default: the bundled demo model)",
    )
    add_config_file_flag(parser)
    add_grouped_flags(parser, (EngineConfig, ServerConfig))
    return parser
