"""`tokenmill session save|load|erase FILE`: keep a conversation of a server with its KV as a file; go on from it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.cli.model_access import add_server_flags, connect
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.sizes import size_text

ACTIONS = {"save": "save", "load": "restore", "erase": "erase"}


def run(arguments: Sequence[str]) -> int:
    """Carry out one action and print what became of it; returns 0.

    Raises:
        InvalidConfig: a file is missing, or one too many.
        TokenMillError: no server answers, or it refuses: there is no such slot or file, or the file is damaged or
            of another model.
    """
    namespace = make_parser().parse(arguments)
    needs_file = namespace.action != "erase"
    if needs_file != (namespace.file is not None):
        raise InvalidConfig("save and load need the name of a file in the server's --slot-save-path; erase takes none")
    path = f"/slots/{namespace.slot}?action={ACTIONS[namespace.action]}"
    answer = connect(namespace).post(path, {"filename": namespace.file} if needs_file else {})
    slot = f"slot {answer['id_slot']}"
    match namespace.action:
        case "save":
            size = size_text(answer["n_written"])
            print(f"{slot}: the KV of {answer['n_saved']:,} tokens is in {namespace.file} ({size})")
        case "load":
            print(
                f"{slot}: {answer['n_restored']:,} tokens of {namespace.file} are found when a prompt begins with them"
            )
        case _:
            print(f"{slot}: {answer['n_erased']:,} tokens erased")
    return 0


def make_parser() -> Parser:
    """Return the parser of `session`."""
    parser = Parser(
        "session",
        "Keep a conversation of a server with its KV as a file: for later, or for another machine with the same model. "
        "The server needs --slot-save-path; requests take its slots in turn, the first one slot 0.",
        "save|load FILE | erase",
    )
    parser.add_argument("action", choices=tuple(ACTIONS), help="save a slot, load one from a file, or erase one")
    parser.add_argument("file", nargs="?", metavar="FILE", help="name of a file in the folder of --slot-save-path")
    parser.add_argument("--slot", type=int, default=0, metavar="N", help="of the conversation (default: 0)")
    add_server_flags(parser)
    return parser
