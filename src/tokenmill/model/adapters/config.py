"""`adapter_config.json` of PEFT: which modules an adapter changes, and by how much. Knows no torch.

Features that are not implemented are refused by name, new fields of later versions too: an adapter that is applied in
part answers like no model that was ever trained.
"""

from __future__ import annotations

import json
import math
import re
import resource
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.regular_file import open_regular
from tokenmill.ipc.python_child import run_python

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 1024
_MOST = 3e38

# What says nothing about how the adapter is applied.
_TOLD_ONLY = frozenset(
    {
        "base_model_name_or_path",
        "revision",
        "task_type",
        "inference_mode",
        "lora_dropout",
        "peft_version",
        "auto_mapping",
    }
    # Read by what is refused when it is set.
    | {"megatron_core", "qalora_group_size", "runtime_config"}
)
# These begin with a change of the base weights: the files alone are of no use.
_CHANGED_BASES = ("pissa", "olora", "loftq", "corda", "lora_ga")

SECONDS = 2
_PLAIN = re.compile(r"[\w.\\-]*")
_TRY = """
import json, re, sys
asked = json.load(sys.stdin)
json.dump({name: [bool(re.fullmatch(form, key)) for key in asked["keys"]] for name, form in asked["forms"].items()},
          sys.stdout)
"""


class _Fields(msgspec.Struct, kw_only=True):
    """The fields that are implemented."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: str | list[str]
    exclude_modules: str | list[str] | None = None
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"


class Strength(msgspec.Struct, frozen=True):
    """The change of a module: W + scale * B A, with A of `rank` rows."""

    rank: int
    scale: float


class AdapterConfig:
    """A config that can be applied.

    Args:
        data: of the file. source: its name, for messages.

    Raises:
        InvalidCheckpoint: it is no PEFT config of a LoRA, or asks for what is not implemented, by its name.
    """

    def __init__(self, data: bytes, source: str) -> None:
        self._source = source
        try:
            raw = msgspec.json.decode(data, type=dict[str, Any])
            self._fields = fields = msgspec.convert(raw, _Fields)
        except (ValueError, RecursionError) as error:
            raise InvalidCheckpoint(f"{source} is no adapter's config: {error}") from error
        if fields.peft_type != "LORA":
            raise self._refusal(f"peft_type {fields.peft_type!r} is not supported, only LORA")
        if fields.bias != "none":
            raise self._refusal(f"bias {fields.bias!r} is not supported, only none")
        if isinstance(fields.init_lora_weights, str) and fields.init_lora_weights.startswith(_CHANGED_BASES):
            raise self._refusal(
                f"init_lora_weights {fields.init_lora_weights!r} begins with other base weights; "
                "save it with path_initial_model_for_weight_conversion"
            )
        for name in raw.keys() - set(_Fields.__struct_fields__) - _TOLD_ONLY:
            if raw[name]:
                raise self._refusal(f"{name} is set, which is not supported")
        self._ranks, self._alphas = fields.rank_pattern or {}, fields.alpha_pattern or {}
        if len(self._ranks) + len(self._alphas) > MAX_PATTERNS:
            raise self._refusal(f"{len(self._ranks) + len(self._alphas)} patterns; at most {MAX_PATTERNS}")
        for rank in (fields.r, *self._ranks.values()):
            if rank < 1:
                raise self._refusal(f"a rank must be at least 1, got {rank}")

    @classmethod
    def read(cls, folder: Path) -> tuple[AdapterConfig, bytes]:
        """Read the config of a folder; return it with the bytes of its file.

        Raises:
            InvalidCheckpoint: as above, or there is no such file.
        """
        path = folder / CONFIG_NAME
        try:
            with open_regular(path) as file:
                data = file.read(MAX_CONFIG_BYTES + 1)
        except OSError as error:
            raise InvalidCheckpoint(f"cannot read {path}: {error.strerror}") from error
        if len(data) > MAX_CONFIG_BYTES:
            raise InvalidCheckpoint(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
        return cls(data, str(path)), data

    def strengths(self, modules: Sequence[str], outside: Sequence[str] = ()) -> dict[str, Strength]:
        """Return the strength of each of a model's modules that the adapter changes, by name.

        Args:
            outside: embedding and head, which are not among "all-linear".

        As PEFT does it: a list names modules by the ends of their names, a string is a regular expression of all of it;
        a pattern is one of the end, and the first that matches counts.

        Raises:
            InvalidCheckpoint: a pattern is no regular expression, or takes too long.
        """
        forms = {key: rf"(?:.*\.)?(?:{key})" for key in (*self._ranks, *self._alphas)}
        found = matches(forms, modules, self._source)
        wanted = self._targeted(modules, outside)
        strengths = {}
        for place, module in enumerate(modules):
            if wanted[place]:
                rank = _first(self._ranks, found, place, self._fields.r)
                alpha = _first(self._alphas, found, place, self._fields.lora_alpha)
                scale = alpha / (math.sqrt(rank) if self._fields.use_rslora else rank)
                if not abs(scale) < _MOST:
                    raise self._refusal(f"the scale of {module} is not a float32 number")
                strengths[module] = Strength(rank, scale)
        return strengths

    def _targeted(self, modules: Sequence[str], outside: Sequence[str]) -> list[bool]:
        target, exclude = self._fields.target_modules, self._fields.exclude_modules or []
        forms = {form: form for form in (target, exclude) if isinstance(form, str) and form != "all-linear"}
        found = matches(forms, modules, self._source) if forms else {}

        def is_in(names: str | list[str], place: int, module: str) -> bool:
            if isinstance(names, str):
                return module not in outside if names == "all-linear" else found[names][place]
            return module in names or any(module.endswith(f".{name}") for name in names)

        return [
            not is_in(exclude, place, module)
            and is_in(target, place, module)
            and (isinstance(target, str) or module in target or self._has_layer(module))
            for place, module in enumerate(modules)
        ]

    def _has_layer(self, module: str) -> bool:
        """Return True if `layers_to_transform` lets a module in, which `target_modules` names by its end."""
        layers, patterns = self._fields.layers_to_transform, self._fields.layers_pattern or [r"[^.]*"]
        if layers is None or layers == []:
            return True
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if pattern != r"[^.]*" and not re.fullmatch(r"\w+", pattern):
                raise self._refusal(f"layers_pattern {pattern!r} is not supported, only plain names")
            match = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
            if match is not None:
                return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
        return False

    def _refusal(self, why: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self._source}: {why}")


def _first(patterns: Mapping[str, Any], found: Mapping[str, list[bool]], place: int, default: Any) -> Any:
    return next((value for key, value in patterns.items() if found[key][place]), default)


def matches(forms: Mapping[str, str], keys: Sequence[str], source: str) -> dict[str, list[bool]]:
    """Return for each expression, by its name, the keys that it matches as a whole.

    The files are anybody's: some expressions take longer than the universe is old, and Python tries them without
    letting go of the interpreter. So all but plain names are tried in a process of their own, which has seconds.

    Raises:
        InvalidCheckpoint: one is no regular expression, or they take too long; names `source`.
    """
    try:
        for form in forms.values():
            re.compile(form)
        if all(_PLAIN.fullmatch(name) for name in forms):
            # A name between dots, whatever is put around it, is compared in a time like its length.
            return {name: [bool(re.fullmatch(form, key)) for key in keys] for name, form in forms.items()}
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidCheckpoint(f"{source}: a pattern is no regular expression: {error}") from error
    question = json.dumps({"forms": dict(forms), "keys": list(keys)})
    try:
        done = run_python(
            ["-I", "-S", "-c", _TRY],
            input=question.encode(),
            capture_output=True,
            timeout=5 * SECONDS,
            preexec_fn=_limit,
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise InvalidCheckpoint(f"{source}: its regular expressions could not be tried in {SECONDS} seconds") from error
    found: dict[str, list[bool]] = json.loads(done.stdout)
    return found


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
