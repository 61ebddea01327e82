"""Read `--models FILE.toml`: what is said of each of several models, over what is said of all.

    ["*"]                       # of all models
    max-model-len = "8k"
    ttl = "10m"

    [small]                     # a model of --models-dir, or with `model` any other
    model = "Qwen/Qwen3-0.6B"
    aliases = ["fast"]
    pinned = true
    sampling = { temperature = 0.6, top_p = 0.95 }
    tool-call-parser = "hermes"  # any flag of `serve`, by its name

Knows flags and their values; does not know which models there are.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.parse import Setting, settings
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.names import did_you_mean
from tokenmill.core.sampling_params import RECOMMENDED, SamplingParams

EVERY = "*"
_OWN = ("model", "aliases", "pinned", "ttl", "group", "sampling", "default")
# Of the server as a whole, or chosen for each model by the process that starts it.
_NOT_PER_MODEL = frozenset(
    {
        "host",
        "port",
        "uds",
        "api_key",
        "api_key_models",
        "metrics_open",
        "served_model_name",
        "root_path",
        "allowed_origins",
    }
    | {"allowed_hosts", "ssl_keyfile", "ssl_certfile", "batch_dir", "batch_max_bytes", "batch_max_files"}
    | {"models_dir", "models", "models_memory", "models_ttl", "models_wait", "model", "api_server_count", "kv_disk"}
    | {"responses_dir", "kv_disk_size", "nnodes", "node_rank", "log_format", "max_body_bytes_in_flight", "download_dir"}
)
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_Config = TypeVar("_Config", EngineConfig, ServerConfig)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Preset(msgspec.Struct, frozen=True):
    """Settings of one model.

    Attributes:
        model: path, hub id or catalogue name; None: the model of `--models-dir` with the preset's name.
        pinned: loaded at the start and never unloaded to make room.
        ttl: seconds without a request after which it is unloaded; 0: never, None: not said.
        group: models of one group are not loaded side by side.
        default: answers requests that name no model.
        sampling: fields of `SamplingParams` where a request gives none.
        engine, server: fields of the configs.
    """

    model: str | None = None
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    ttl: float | None = None
    group: str | None = None
    default: bool = False
    sampling: Mapping[str, Any] = msgspec.field(default_factory=dict)
    engine: Mapping[str, Any] = msgspec.field(default_factory=dict)
    server: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def apply(self, config: _Config) -> _Config:
        """Return a config with what is said of this model."""
        changes = self.engine if isinstance(config, EngineConfig) else self.server
        return dataclasses.replace(config, **changes)


class Presets(msgspec.Struct, frozen=True):
    """All presets of a file; `every` holds for models that have none of their own, too."""

    every: Preset = Preset()
    named: Mapping[str, Preset] = msgspec.field(default_factory=dict)

    def of(self, name: str) -> Preset:
        """Return the preset of a model."""
        return self.named.get(name, self.every)


def read_presets(path: Path) -> Presets:
    """Read a file of presets; relative paths of models are seen from its folder.

    Raises:
        InvalidConfig: the file cannot be read, or one sentence on the first thing in it that is wrong.
    """
    content = _read_toml("--models", path)
    for name, table in content.items():
        if not isinstance(table, dict):
            raise InvalidConfig(f'{path}: {name} stands outside of a model: put it below [name], or ["*"] for all')
    common = content.pop(EVERY, {})
    for key in ("model", "aliases", "default", "pinned"):
        if key in common:
            raise InvalidConfig(f"{path}: [{EVERY}] is of all models, and {key} of one")
    named = {name: _preset(path, name, {**common, **table}) for name, table in content.items()}
    if sum(preset.default for preset in named.values()) > 1:
        raise InvalidConfig(f"{path}: more than one model is the default")
    return Presets(_preset(path, EVERY, common), named)


def read_key_models(path: Path) -> Mapping[str, frozenset[str]]:
    """Read `--api-key-models FILE.toml`: lines of `"KEY" = ["model", ...]`; `"*"` stands for all models.

    Raises:
        InvalidConfig: the file cannot be read, or an entry is no list of names. No key is shown.
    """
    found = {}
    for number, (key, names) in enumerate(_read_toml("--api-key-models", path).items(), 1):
        if not key or not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise InvalidConfig(f'--api-key-models {path}: entry {number} is not "KEY" = ["model", ...]')
        found[key] = frozenset(names)
    return found


def _read_toml(flag: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"{flag} {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{flag} {path} is not valid TOML: {error}") from None


def parse_duration(value: Any) -> float:
    """Return the seconds of a number or a text such as 90, `10m`, `1h30m`; a negative number is infinity, for ever.

    Raises:
        InvalidConfig: it is no duration.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float("inf") if value < 0 else float(value)
    text = str(value).strip()
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return parse_duration(float(text))
    sign, text = text.startswith("-"), text.lstrip("-")
    if not _DURATION.fullmatch(text):
        raise InvalidConfig(f"{value!r} is not a duration; write 90, 10m or 1h30m")
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    return float("inf") if sign else sum(float(number) * _UNITS[unit] for number, unit in parts)


def _preset(path: Path, name: str, table: Mapping[str, Any]) -> Preset:
    """Return the preset of one table of the file."""
    own: dict[str, Any] = {}
    configs: dict[type, dict[str, Any]] = {EngineConfig: {}, ServerConfig: {}}
    known = _known()
    for key, value in table.items():
        place = f"{path}: [{name}] {key}"
        field_name = key.replace("-", "_")
        try:
            if field_name in _OWN:
                own[field_name] = _own_value(field_name, value, path)
            elif field_name in known:
                config, setting = known[field_name]
                configs[config][setting.name] = setting.convert_value(value)
            else:
                allowed = [*_OWN, *(spelling.replace("_", "-") for spelling in known)]
                raise InvalidConfig(f"unknown key{did_you_mean(key, allowed)}")
        except InvalidConfig as error:
            raise InvalidConfig(f"{place}: {error}") from None
    return Preset(**own, engine=configs[EngineConfig], server=configs[ServerConfig])


def _known() -> dict[str, tuple[type, Setting]]:
    """Return the settings of one model by all spellings, as field names."""
    found: dict[str, tuple[type, Setting]] = {}
    for config in (EngineConfig, ServerConfig):
        for setting in settings(config):
            if setting.name not in _NOT_PER_MODEL:
                for spelling in (setting.flag, *setting.how.aliases):
                    if spelling.startswith("--"):
                        found[spelling[2:].replace("-", "_")] = (config, setting)
    return found


def _own_value(name: str, value: Any, path: Path) -> Any:
    """Return the value of a key that is no flag."""
    if name in ("pinned", "default"):
        kind: tuple[type, str] = (bool, "true or false")
    elif name == "aliases":
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(one, str) and one for one in names):
            raise InvalidConfig(f"{value!r} is not a list of names")
        return tuple(names)
    elif name == "ttl":
        return parse_duration(value)
    elif name == "sampling":
        return _sampling(value)
    else:
        kind = (str, "a text")
    if not isinstance(value, kind[0]) or value == "":
        raise InvalidConfig(f"{value!r} is not {kind[1]}")
    if name == "model":
        assert isinstance(value, str)
        place = path.parent / Path(value).expanduser()
        return str(place) if value.startswith(("./", "../", "~")) or place.exists() else value
    return value


def _sampling(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidConfig(f"{value!r} is not a table of sampling parameters")
    allowed = (*RECOMMENDED, "max_tokens")
    for name in value:
        if name not in allowed:
            raise InvalidConfig(f"no sampling parameter {name!r}{did_you_mean(name, allowed)}")
    try:
        SamplingParams(**value)
    except (InvalidRequest, TypeError) as error:
        raise InvalidConfig(str(error)) from None
    return value
