"""Flags, `TOKENMILL_*` variables and config file keys, all made from the metadata of the config dataclasses.

A flag wins over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.flag_groups import GROUPS
from tokenmill.config.parse import Setting, settings
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.names import did_you_mean

ENV_PREFIX = "TOKENMILL_"
# Variables of the same prefix that are not config fields: the clients read them, or they name the file itself.
_LLAMA_PREFIX = "LLAMA_ARG_"
OTHER_VARIABLES = frozenset({"CONFIG", "URL", "API_KEY", "CACERT"})
# What Kubernetes tells every container of a Service that is called tokenmill.
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
C = TypeVar("C")


class Given(msgspec.Struct, frozen=True):
    """The settings that a user has given, by source.

    Attributes:
        flags: field name -> value, from the command line.
        environment: the process environment.
        file: field name or alias -> value as YAML has it.
        file_name: for messages.
    """

    flags: Mapping[str, Any]
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    file: Mapping[str, Any] = msgspec.field(default_factory=dict)
    file_name: str = ""


def add_flags(parser: Parser, config_class: type, title: str, names: Collection[str] | None = None) -> None:
    """Add the flags of a config class as a group of their own; flags that are not given leave no attribute.

    Args:
        names: the fields whose flags they are; None: all.
    """
    wanted = [setting for setting in settings(config_class) if names is None or setting.name in names]
    _add_group(parser, title, wanted)


def add_grouped_flags(parser: Parser, config_classes: Iterable[type]) -> None:
    """Add the flags of config classes in the groups of `flag_groups`, and those that none names behind them."""
    found = {setting.name: setting for config_class in config_classes for setting in settings(config_class)}
    for title, names in GROUPS:
        _add_group(parser, title, [found.pop(name) for name in names])
    if found:
        _add_group(parser, "further flags", found.values())


def _add_group(parser: Parser, title: str, wanted: Iterable[Setting]) -> None:
    group = parser.add_argument_group(title)
    parser.is_engines = True
    for setting in wanted:
        spellings = (setting.flag, *setting.how.aliases)
        how: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": _help(setting)}
        if setting.kind == "bool":
            how["action"] = argparse.BooleanOptionalAction
        else:
            how |= {"type": _reader(setting), "metavar": _metavar(setting)}
            if setting.how.repeat:
                how["action"] = "extend"
                parser.repeatable.update(spellings)
        group.add_argument(*spellings, **how)


def add_config_file_flag(parser: Parser) -> None:
    """Add `--config FILE.yaml`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags as keys (flags and environment win)")


def read_given(namespace: argparse.Namespace, environment: Mapping[str, str]) -> Given:
    """Collect what was set, reading the config file where one is named.

    Raises:
        InvalidConfig: the file cannot be read or is not a mapping.
    """
    environment = _without_service_links(environment)
    path = namespace.config or environment.get(ENV_PREFIX + "CONFIG")
    file = _read_file(path) if path else {}
    return Given(vars(namespace), environment, file, path or "")


def _without_service_links(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without the variables of a Kubernetes Service that has our name, telling about them."""
    links = [name for name in environment if _is_service_link(name, environment[name])]
    if links:
        print(
            f"tokenmill: {links[0]}={environment[links[0]]} is ignored: Kubernetes sets it for a Service named "
            "tokenmill; `enableServiceLinks: false` in the pod's spec keeps it away",
            file=sys.stderr,
        )
    return {name: value for name, value in environment.items() if name not in links}


def _is_service_link(name: str, value: str) -> bool:
    if not name.startswith(ENV_PREFIX):
        return False
    rest = name.removeprefix(ENV_PREFIX)
    return _SERVICE_LINK.fullmatch(rest) is not None or (rest == "PORT" and _SERVICE_URL.match(value) is not None)


def build(config_class: type[C], given: Given) -> C:
    """Build a config from flags, environment, file and defaults.

    Raises:
        InvalidConfig: a value cannot be read; the message names its source.
    """
    values: dict[str, Any] = {}
    for setting in settings(config_class):
        variable = ENV_PREFIX + setting.name.upper()
        if setting.name in given.flags:
            value = given.flags[setting.name]
            values[setting.name] = tuple(value) if setting.how.repeat else value
        elif variable in given.environment:
            values[setting.name] = _named(variable, setting.read, given.environment[variable])
        else:
            for key in _keys(setting):
                if key in given.file:
                    values[setting.name] = _named(f"{given.file_name}: {key}", setting.convert_value, given.file[key])
    return config_class(**values)


def check_names(given: Given, config_classes: Iterable[type]) -> None:
    """Refuse unknown keys of the config file; name unknown variables, which may belong to another program.

    Raises:
        InvalidConfig: naming the key and a similar known one.
    """
    known = [setting for config_class in config_classes for setting in settings(config_class)]
    keys = {key for setting in known for key in _keys(setting)}
    for key in given.file:
        if key not in keys:
            raise InvalidConfig(f"{given.file_name}: unknown key {key}{did_you_mean(str(key), keys)}")
    variables = {ENV_PREFIX + setting.name.upper() for setting in known}
    for name in given.environment:
        other = name.removeprefix(ENV_PREFIX) in OTHER_VARIABLES
        if name.startswith(ENV_PREFIX) and name not in variables and not other:
            print(f"tokenmill: {name} is ignored: unknown flag{did_you_mean(name, variables)}", file=sys.stderr)
    foreign = sorted(name for name in given.environment if name.startswith(_LLAMA_PREFIX))
    if foreign:
        more = f" and {len(foreign) - 1} more of llama.cpp are" if len(foreign) > 1 else " is"
        flag = "--" + foreign[0].removeprefix(_LLAMA_PREFIX).lower().replace("_", "-")
        print(
            f"tokenmill: {foreign[0]}{more} not read: give llama.cpp's flags themselves, such as {flag}, which are "
            f"understood or named, or set variables of ours, such as {ENV_PREFIX}MAX_MODEL_LEN",
            file=sys.stderr,
        )


def _keys(setting: Setting) -> list[str]:
    names = [name.lstrip("-") for name in (setting.flag, *setting.how.aliases)]
    return [*names, *(name.replace("-", "_") for name in names if "-" in name)]


def _read_file(path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"cannot read the config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} must hold flags as keys (max-model-len: 32k), not a {type(content).__name__}")
    return _in_our_words(path, content)


def _in_our_words(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file with the keys of other engines replaced by ours; unknown keys stay, see `check_names`."""
    from tokenmill.config.foreign_flags import NEGATION, find, foreign_flags

    known = {key for config in (EngineConfig, ServerConfig) for setting in settings(config) for key in _keys(setting)}
    ours = {key: value for key, value in content.items() if key in known}
    table = foreign_flags() if len(ours) < len(content) else {}
    for key, value in content.items():
        flag, is_negated = find(f"--{key}", table)
        if flag is None or key in known:
            ours[key] = value
            continue
        texts = value if isinstance(value, list) else [value]
        texts = [text if isinstance(text, str) else json.dumps(text) for text in texts]
        words, note = _named(f"{path}: {key}", partial(flag.replacement, is_negated=is_negated), texts)
        if note:
            print(f"tokenmill: {path}: {note}", file=sys.stderr)
        if words:
            name = "--" + words[0].removeprefix(NEGATION).removeprefix("--")
            ours[name[2:]] = words[1] if len(words) > 1 else not words[0].startswith(NEGATION)
    return ours


def _named(place: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except InvalidConfig as error:
        raise InvalidConfig(f"{place}: {error}") from None


def _reader(setting: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            # A repeatable flag brings one text each time, commas included: a key may contain one.
            return [text] if setting.how.repeat else setting.read(text)
        except InvalidConfig as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _metavar(setting: Setting) -> str:
    if setting.how.choices:
        return "{" + ",".join([*setting.how.choices, *(["module:name"] if setting.how.plugins else [])]) + "}"
    if setting.how.size:
        return "SIZE"
    return {"int": "N", "float": "X"}.get(setting.kind, "TEXT")


def _help(setting: Setting) -> str:
    text = setting.how.help.replace("%", "%%")
    shown = setting.default not in (None, "", (), False, 0)
    return f"{text} (default: {setting.default})" if shown and setting.kind != "bool" else text
