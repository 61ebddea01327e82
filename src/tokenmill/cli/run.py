"""`tokenmill run MODEL [PROMPT]`: chat with a model, or answer a prompt, whether a server of it runs already or not."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.cli.model_access import write_delta
from tokenmill.cli.sampling_flags import add_sampling_flags, sampling_fields
from tokenmill.cli.servers import (
    DEMO,
    check_model_is_there,
    find_by_asking,
    find_entry,
    model_at,
    note_ignored,
    reach,
    servers_folder,
    start_server,
    wait_until_ready,
)
from tokenmill.config.parser import Parser, finite
from tokenmill.core.errors import InvalidConfig
from tokenmill.ipc.server_registry import running_servers

if TYPE_CHECKING:
    from tokenmill.llm.remote import RemoteModel

TTL_SECONDS = 300.0


def run(arguments: Sequence[str]) -> int:
    """Answer the prompt, or chat until /exit; returns 0, or 1 if an answer failed.

    Raises:
        TokenMillError: there is no such model, its server cannot start, or it refuses.
    """
    given = list(arguments)
    place = given.index("--") if "--" in given else len(given)
    namespace = make_parser().parse(given[:place])
    if namespace.ttl < 0:
        raise InvalidConfig(f"--ttl must be 0 seconds or more, got {namespace.ttl:g}")
    server = server_of(namespace, given[place + 1 :])
    from tokenmill.cli.chat import Chat

    fields = sampling_fields(namespace)
    if namespace.prompt is None:
        chat = Chat(server, fields, namespace.system)
        chat.talk()
        return int(chat.failed)
    prompt = sys.stdin.read() if namespace.prompt == "-" else namespace.prompt
    system = [{"role": "system", "content": namespace.system}] if namespace.system else []
    for delta in server.chat([*system, {"role": "user", "content": prompt}], fields):
        write_delta(sys.stdout, delta.text)
    print()
    return 0


def make_parser() -> Parser:
    """Return the parser of `run`."""
    parser = Parser(
        "run",
        "Chat with a model, or answer one prompt. A running server that serves the model is used; else one is started "
        "in the background, which ends by itself once nobody has asked it anything for a while. What stands behind -- "
        "are flags of serve for it.",
        "[MODEL [PROMPT]]",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder, .gguf file, hub id, or a served name (default: demo)",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="answer this and end; - reads it from stdin")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--ttl",
        type=finite,
        default=TTL_SECONDS,
        metavar="S",
        help="seconds without a request after which a server that is started ends; 0: never (default: 300)",
    )
    url, key = os.environ.get("TOKENMILL_URL"), "key of the server, also as TOKENMILL_API_KEY"
    parser.add_argument("--url", default=url, help="a server to use if it serves the model, also as TOKENMILL_URL")
    parser.add_argument("--api-key", default=None, help=key)
    parser.add_argument(
        "--cacert", default=os.environ.get("TOKENMILL_CACERT"), metavar="FILE", help="certificates to trust (PEM)"
    )
    add_sampling_flags(parser)
    return parser


def server_of(namespace: argparse.Namespace, flags: Sequence[str]) -> RemoteModel:
    """Return the model at a server: the one named by `--url`, one of this user's, or one that is started now.

    Raises:
        TokenMillError: the server named by `--url` does not serve the model, or none can be started.
    """
    from tokenmill.llm.remote import RemoteModel

    model = "" if namespace.model == DEMO else namespace.model
    key = namespace.api_key or os.environ.get("TOKENMILL_API_KEY", "").split(",")[0] or None
    if namespace.url:
        server = RemoteModel(namespace.url, key, None, namespace.cacert)
        name = model_at(server, model) if model else None
        if model and name is None:
            raise InvalidConfig(f"{namespace.url} does not serve {model}; leave out --url to start a server of it")
        note_ignored(flags)
        return RemoteModel(namespace.url, key, name, namespace.cacert)
    entries = running_servers(servers_folder())
    entry = find_entry(entries, model)
    found = find_by_asking(entries, model, key, namespace.cacert) if entry is None else None
    if entry is None and found is None:
        check_model_is_there(model)
        entry = start_server(model, flags, namespace.ttl, sys.stderr)
    elif flags:
        note_ignored(flags)
    if found is not None:
        return reach(found[0], key, found[1], namespace.cacert)
    assert entry is not None, "found or started"
    wait_until_ready(entry)
    return reach(entry, key, model if model in entry.models else entry.models[0], namespace.cacert)
