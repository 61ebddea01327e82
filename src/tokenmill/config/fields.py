"""The parts that configs are declared with: fields that are flags, and fields that are JSON objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any, Literal

import msgspec

from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.names import did_you_mean
from tokenmill.core.sampling_params import RECOMMENDED, SamplingParams


class Flag(msgspec.Struct, frozen=True):
    """The form of a config field on the command line.

    Attributes:
        aliases: further spellings, including those of vLLM and SGLang.
        choices: the values it may take; empty: any.
        plugins: the group of entry points whose names it may take too, and `module:name`; empty: only `choices`.
        size: accepts `32k`, `4GiB` and the like, besides a plain integer.
        repeat: may be given several times; the field is a tuple.
        json: the text is an object in JSON, which a YAML file may also spell as a mapping.
    """

    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    plugins: str = ""
    size: bool = False
    repeat: bool = False
    json: bool = False


def flag(default: Any, help: str, **how: Any) -> Any:
    """Declare a dataclass field that is also a flag; see `Flag`."""
    return field(default=default, metadata={"flag": Flag(help, **how)})


def adapter_modules(given: Iterable[str]) -> dict[str, str]:
    """Return the names and folders of `--lora-modules`: `name=path`, or vLLM's JSON with `name` and `path`.

    Raises:
        InvalidConfig: a value has neither form, or a name is given twice.
    """
    modules: dict[str, str] = {}
    for text in given:
        name, sign, path = text.partition("=")
        if text.startswith("{"):
            try:
                module = msgspec.json.decode(text, type=_Module)
            except msgspec.DecodeError as error:
                raise InvalidConfig(f"--lora-modules: {error}") from error
            name, path = module.name, module.path
        elif not sign:
            raise InvalidConfig(f"--lora-modules takes name=path, got {text!r}")
        if not name or not path or name in modules:
            raise InvalidConfig(f"--lora-modules: {text!r} has no name, no path, or a name that is taken")
        modules[name] = path
    return modules


_SAMPLING = (*RECOMMENDED, "presence_penalty", "frequency_penalty", "max_tokens")


def sampling_overrides(given: Iterable[str]) -> dict[str, Any]:
    """Return the sampling parameters of `--override-generation-config`: the last value of a name counts.

    Raises:
        InvalidConfig: a value is not a JSON object, names another parameter, or is outside of its range.
    """
    try:
        # A variable of the environment is parted at its commas, and so may an object be that stands in it.
        objects = msgspec.json.decode(f"[{','.join(given)}]", type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise InvalidConfig(f"--override-generation-config takes a JSON object: {error}") from error
    found: dict[str, Any] = {}
    for theirs, value in ((name, value) for one in objects for name, value in one.items()):
        name = "max_tokens" if theirs == "max_new_tokens" else theirs
        if name not in _SAMPLING:
            raise InvalidConfig(
                f"--override-generation-config: {name} is not one of {', '.join(_SAMPLING)}"
                + did_you_mean(name, _SAMPLING)
            )
        found[name] = value
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise InvalidConfig(f"--override-generation-config: {error}") from error
    return found


def template_defaults(given: str | None) -> dict[str, Any]:
    """Return the variables of `--default-chat-template-kwargs`.

    Raises:
        InvalidConfig: it is not a JSON object.
    """
    try:
        return msgspec.json.decode(given or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidConfig(f"--default-chat-template-kwargs takes a JSON object: {error}") from error


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    base_model_name: str | None = None


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of `--kv-events-config`, with vLLM's field names.

    Attributes:
        endpoint: the address to publish events at; on this machine only by default.
        replay_endpoint: the address at which subscribers may ask for events they missed; None: none.
        buffer_steps: batches kept for replays.
    """

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of `--structured-outputs-config`: vLLM's names, and the limits of compiling a grammar.

    Attributes:
        disable_any_whitespace: allow no white space between the parts of JSON.
        compile_seconds: processor time that compiling one grammar may take.
        compile_bytes: memory that it may take.
        cache_bytes: memory for compiled grammars; beyond it those that no request uses are dropped.
    """

    backend: Literal["auto", "guidance"] = "auto"
    disable_any_whitespace: bool = False
    compile_seconds: float = 1.0
    compile_bytes: int = 256 << 20
    cache_bytes: int = 128 << 20
