"""`tokenmill completion SHELL`: write a script that completes verbs, flags and values, from the verbs' parsers."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tokenmill.config.parser import Parser
from tokenmill.lab.bench import KINDS

# Verbs whose next word is one of these.
WORDS = {"bench": KINDS, "completion": {"bash": "", "zsh": "", "fish": ""}}


class Option(msgspec.Struct, frozen=True):
    """A flag: its spellings, its purpose, and its possible values, if these are few."""

    names: Sequence[str]
    purpose: str
    takes_value: bool
    choices: Sequence[str]


def run(arguments: Sequence[str]) -> int:
    """Print the script; returns 0."""
    shell = make_parser().parse(arguments).shell
    from tokenmill.cli.main import VERBS

    scripts: dict[str, Callable[[dict[str, str]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    print("\n".join(scripts[shell](VERBS)))
    return 0


def make_parser() -> Parser:
    """Return the parser of `completion`."""
    parser = Parser(
        "completion", 'Completion for a shell: source <(tokenmill completion bash), or "| source".', "SHELL"
    )
    parser.add_argument("shell", choices=list(WORDS["completion"]), metavar="SHELL", help="bash, zsh or fish")
    return parser


def options(verbs: dict[str, str]) -> Iterator[tuple[str, list[Option]]]:
    """Yield the flags of every command, `serve` or `bench serve`, from its parser."""
    for verb in verbs:
        modules = {verb: f"tokenmill.cli.{verb}"}
        if verb == "bench":
            modules = {f"bench {kind}": f"tokenmill.lab.bench.{kind}" for kind in KINDS}
        for name, module in modules.items():
            parser = importlib.import_module(module).make_parser()
            yield name, [_option(action) for action in parser._actions if action.option_strings]


def _option(action: argparse.Action) -> Option:
    metavar, purpose = str(action.metavar or ""), (action.help or "").replace("%%", "%").replace("%(default)s", "")
    listed = metavar[1:-1].split(",") if metavar.startswith("{") else []
    return Option(action.option_strings, purpose, action.nargs != 0, [one for one in listed if ":" not in one])


def _bash(verbs: dict[str, str]) -> Iterator[str]:
    yield "_tokenmill() {"
    yield '  local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" found='
    yield from _shell_cases(verbs, "COMP_CWORD", '"${COMP_WORDS[2]}"', '"${COMP_WORDS[COMP_CWORD-1]}"')
    yield '  COMPREPLY=($(compgen -W "$found" -- "$current"))'
    yield "}"
    yield "complete -o default -F _tokenmill tokenmill"


def _zsh(verbs: dict[str, str]) -> Iterator[str]:
    yield "_tokenmill() {"
    yield '  local current="$words[CURRENT]" command="$words[2]" found='
    yield from _shell_cases(verbs, "CURRENT-1", '"$words[3]"', '"$words[CURRENT-1]"')
    yield '  if [[ -n "$found" ]]; then compadd -- ${=found}; else _files; fi'
    yield "}"
    yield "compdef _tokenmill tokenmill"


def _shell_cases(verbs: dict[str, str], place: str, second: str, previous: str) -> Iterator[str]:
    """Yield the lines that bash and zsh share: `found` becomes the words that can stand at this place."""
    yield f"  if [[ {place} -eq 1 ]]; then found={shlex.quote(' '.join(verbs))}"
    for verb, words in WORDS.items():
        yield f'  elif [[ "$command" == {verb} && {place} -eq 2 ]]; then found={shlex.quote(" ".join(words))}'
    yield "  else"
    yield f'    [[ "$command" == bench ]] && command="bench "{second}'
    yield f'    case "$command "{previous} in'
    flags = {}
    for command, known in options(verbs):
        flags[command] = [name for option in known for name in option.names if name.startswith("--")]
        for option in known:
            if option.takes_value:
                patterns = "|".join(f'"{command} {name}"' for name in option.names)
                yield f"      {patterns}) found={shlex.quote(' '.join(option.choices))} ;;"
    yield '      *) [[ "$current" == -* ]] && case "$command" in'
    for command, names in flags.items():
        yield f'        "{command}") found={shlex.quote(" ".join(names))} ;;'
    yield "      esac ;;"
    yield "    esac"
    yield "  fi"


def _fish(verbs: dict[str, str]) -> Iterator[str]:
    yield 'function __tokenmill_at; set -l words (commandline -opc); test "$words[2..]" = "$argv"; end'
    yield "function __tokenmill_in; set -l words (commandline -opc); set -l last (math (count $argv) + 1)"
    yield '  test (count $words) -ge $last; and test "$words[2..$last]" = "$argv"; end'
    for verb, purpose in verbs.items():
        yield f"complete -c tokenmill -f -n __tokenmill_at -a {verb} -d {_fish_quote(purpose)}"
    for verb, words in WORDS.items():
        for word, purpose in words.items():
            yield f"complete -c tokenmill -f -n '__tokenmill_at {verb}' -a {word} -d {_fish_quote(purpose)}"
    for command, known in options(verbs):
        for option in known:
            names = " ".join(_fish_name(name) for name in option.names)
            values = f" -xa {_fish_quote(' '.join(option.choices))}" if option.choices else " -r" * option.takes_value
            purpose = _fish_quote(option.purpose)
            yield f"complete -c tokenmill -n '__tokenmill_in {command}' {names} -d {purpose}{values}"


def _fish_name(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
