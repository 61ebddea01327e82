"""Read the files of sentence-transformers: modules.json, a folder for each module behind the model, and their fields.

The forms of version 2 to 6 are read; what a file leaves out is as in version 6. Nothing that a file names is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.pooling import PoolMode
from tokenmill.core.regular_file import read_regular
from tokenmill.model.pooling.spec import Activation, DenseSpec, LayerNormSpec, Step, TokenScoreSpec

MODULES = "modules.json"
# The field of 1_Pooling/config.json in its old form, and the name in its new one; in the order of `PoolMode`.
_OLD_MODES: Mapping[str, PoolMode] = MappingProxyType(
    {
        "pooling_mode_cls_token": PoolMode.CLS,
        "pooling_mode_max_tokens": PoolMode.MAX,
        "pooling_mode_mean_tokens": PoolMode.MEAN,
        "pooling_mode_mean_sqrt_len_tokens": PoolMode.SQRT,
        "pooling_mode_weightedmean_tokens": PoolMode.WEIGHTED,
        "pooling_mode_lasttoken": PoolMode.LAST,
    }
)
_MODES: Mapping[str, PoolMode] = MappingProxyType(
    {mode.value: mode for mode in PoolMode} | {"lasttoken": PoolMode.LAST}
)
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {name.lower(): one for name, one in (("Identity", Activation.IDENTITY), ("Softmax", Activation.SOFTMAX))}
    | {one.value: one for one in Activation}
)
_SKIPPED = ("Transformer", "Dropout")
# Where a module finds its input and leaves its output, unless its config says otherwise.
_VECTOR = "sentence_embedding"


class _Module(msgspec.Struct):
    path: str
    type: str

    @property
    def kind(self) -> str:
        """The class, whatever package it has moved to."""
        return self.type.rpartition(".")[2]


class _Dense(msgspec.Struct):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False
    module_input_name: str = _VECTOR
    module_output_name: str | None = None


class _LogitScore(msgspec.Struct):
    true_token_id: int
    false_token_id: int | None = None


class _Limits(msgspec.Struct):
    max_seq_length: int | None = None
    do_lower_case: bool = False


@dataclass(slots=True)
class Modules:
    """The modules behind a model.

    Attributes:
        modes: of the Pooling module; empty: there is none.
        steps: the modules behind it.
        normalizes: vectors end with length 1.
    """

    modes: tuple[PoolMode, ...] = ()
    includes_prompt: bool = True
    steps: list[Step] = field(default_factory=list)
    normalizes: bool = False


def read_modules(folder: Path) -> Modules | None:
    """Read modules.json and the modules' configs; None: there is no such file.

    Raises:
        InvalidCheckpoint: a file is broken, or a module is not supported; names it.
    """
    path = folder / MODULES
    try:
        listed = msgspec.json.decode(read_regular(path), type=list[_Module])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path} is not a list of modules: {error}") from error
    found = Modules()
    for module in listed:
        _add(found, module, folder)
    return found


def _add(found: Modules, module: _Module, folder: Path) -> None:
    """Add what one module does."""
    parts = PurePosixPath(module.path).parts
    if ".." in parts or module.path.startswith("/"):
        raise InvalidCheckpoint(f"{folder / MODULES}: the path {module.path!r} leads out of the folder")
    if module.kind == "Transformer" and module.path:
        raise InvalidCheckpoint(f"{folder / MODULES}: the model lies in {module.path}, which is not supported")
    if module.kind in _SKIPPED:
        return
    if found.normalizes:
        raise InvalidCheckpoint(f"{folder / MODULES}: {module.kind} stands behind Normalize, which is not supported")
    if module.kind == "Pooling":
        found.modes, found.includes_prompt = _pooling(folder / module.path)
    elif module.kind == "Dense":
        found.steps.append(_dense(folder / module.path, module.path))
    elif module.kind == "LayerNorm":
        found.steps.append(LayerNormSpec(module.path, "norm"))
    elif module.kind == "LogitScore":
        config = _fields(folder / module.path, _LogitScore)
        false = "" if config.false_token_id is None else config.false_token_id
        found.steps.append(TokenScoreSpec(config.true_token_id, false))
    elif module.kind == "Normalize":
        found.normalizes = True
    else:
        raise InvalidCheckpoint(f"{folder / MODULES}: the module {module.type} is not supported")


def _pooling(folder: Path) -> tuple[tuple[PoolMode, ...], bool]:
    """Return the modes of a Pooling module, and whether tokens of prompts are pooled."""
    config = read_json(folder, "config.json")
    new = config.get("pooling_mode")
    names = [new] if isinstance(new, str) else new
    if names is None:
        modes = {mode for name, mode in _OLD_MODES.items() if config.get(name) is True}
    elif isinstance(names, list) and all(isinstance(name, str) and name in _MODES for name in names):
        modes = {_MODES[name] for name in names}
    else:
        raise InvalidCheckpoint(f"{folder}/config.json: pooling_mode {new!r} is not supported")
    ordered = tuple(mode for mode in PoolMode if mode in modes) or (PoolMode.MEAN,)
    return ordered, config.get("include_prompt") is not False


def _dense(folder: Path, path: str) -> DenseSpec:
    config = _fields(folder, _Dense)
    if config.module_input_name != _VECTOR or config.module_output_name not in (None, _VECTOR, "scores"):
        raise InvalidCheckpoint(
            f"{folder}/config.json: module_input_name {config.module_input_name!r} is not supported"
        )
    activation = read_activation(config.activation_function, f"{folder}/config.json: activation_function")
    sizes = config.in_features, config.out_features
    return DenseSpec(path, "linear", activation, config.bias, config.use_residual, sizes)


def read_activation(name: object, field_name: str) -> Activation:
    """Return the function that a dotted name of torch stands for, by its last part.

    Raises:
        InvalidCheckpoint: it is another; `field_name` says where it stands.
    """
    found = _ACTIVATIONS.get(name.rpartition(".")[2].removesuffix("()").lower()) if isinstance(name, str) else None
    if found is None:
        raise InvalidCheckpoint(f"{field_name} {name!r} is not supported")
    return found


def read_limits(folder: Path) -> tuple[int | None, bool]:
    """Return the most tokens of a text that sentence_bert_config.json allows, None: any; and whether it lowers case."""
    names = sorted(path.name for path in folder.glob("sentence_*_config.json"))
    first = next(iter([name for name in names if name == "sentence_bert_config.json"] or names), None)
    if first is None:
        return None, False
    limits = _convert(read_json(folder, first), folder / first, _Limits)
    if limits.max_seq_length is not None and limits.max_seq_length < 1:
        raise InvalidCheckpoint(f"{folder / first}: max_seq_length must be at least 1")
    return limits.max_seq_length, limits.do_lower_case


def _fields(folder: Path, kind: type[Any]) -> Any:
    return _convert(read_json(folder, "config.json"), folder / "config.json", kind)


def _convert(fields: dict[str, Any], path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidCheckpoint(f"{path}: {error}") from error
