"""A checkpoint folder in the Hugging Face layout: its config, and which tensor lies in which file.

Opens only JSON and safetensors headers; knows no torch. Nothing in a folder is ever run or unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tokenmill.config.model_files import check_eos_token_ids
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.model_description import StoredFormat
from tokenmill.core.regular_file import read_regular
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.architecture_config import read_architecture as architecture_of
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.pooling.modules import read_limits
from tokenmill.model.quantization.scheme import QuantizationScheme, read_scheme
from tokenmill.model.weights.safetensors_header import StoredTensor, read_header

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Files made from TensorFlow's call weight and bias of a LayerNorm so.
OLD_SUFFIXES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


class Checkpoint(msgspec.Struct, frozen=True):
    """The weights of a folder.

    Attributes:
        source: the file to name when a tensor is missing: the index, or the only shard.
        tensors: every stored tensor by name.
        scheme: how weights are quantized.
    """

    folder: Path
    source: Path
    tensors: dict[str, StoredTensor]
    scheme: QuantizationScheme

    def named_for(self, architecture: Architecture) -> Checkpoint:
        """Return it with the names that a decoder has inside a model that generates, if it was stored alone.

        Qwen3-Embedding's tensors are `layers.0...` where Qwen3's are `model.layers.0...`.
        """
        wanted = WeightKey("embedding").name(architecture.weight_names)
        prefix, _, bare = wanted.partition(".")
        if wanted in self.tensors or bare not in self.tensors:
            return self
        named = {}
        for name, tensor in self.tensors.items():
            inside = name if name.startswith(architecture.other_weights) else f"{prefix}.{name}"
            named[inside] = msgspec.structs.replace(tensor, name=inside)
        return msgspec.structs.replace(self, tensors=named)


def read_architecture(folder: Path) -> Architecture:
    """Return the architecture that a folder's config.json describes.

    Raises:
        InvalidCheckpoint: no config.json, broken JSON, or something in it is not supported; or generation_config.json
            has an `eos_token_id` that the model lacks.
    """
    path = folder / CONFIG_NAME
    architecture = architecture_of(_read_json(path), str(path))
    check_eos_token_ids(folder, architecture.vocab_size)
    longest, _ = read_limits(folder)
    if longest is not None and longest < architecture.max_position:
        return msgspec.structs.replace(architecture, max_position=longest)
    return architecture


def stored_scheme(folder: Path) -> QuantizationScheme:
    """Return the quantization of a folder's weights: as config.json says, unless they are there and are plain floats.

    Raises:
        InvalidCheckpoint: config.json cannot be read or has a method that is not supported, or a weight file is broken.
    """
    scheme = _said_scheme(folder)
    if scheme.method == "none" or not any((folder / name).exists() for name in (INDEX_NAME, SINGLE_NAME)):
        return scheme
    return open_checkpoint(folder).scheme


def stored_format(folder: Path, dtype: str, quantization: str) -> StoredFormat:
    """Return the form of a folder's files, and of its weights when they are loaded.

    Args:
        dtype: of weights that nothing quantizes.
        quantization: of weights that are quantized as they are loaded: `int8` and so on; `none`.

    Raises:
        InvalidCheckpoint: config.json cannot be read or has a method that is not supported, or a weight file is broken.
    """
    fields = _read_json(folder / CONFIG_NAME)
    asked = None if quantization == "none" else quantization
    if "gguf_architecture" in fields:
        return StoredFormat("gguf", str(fields["gguf_architecture"]), asked or str(fields.get("gguf_file_type", "")))
    method = stored_scheme(folder).method
    family = str(fields.get("model_type") or "")
    return StoredFormat("safetensors", family, asked or (dtype if method == "none" else method))


def _said_scheme(folder: Path) -> QuantizationScheme:
    path = folder / CONFIG_NAME
    return read_scheme(_read_json(path), str(path))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of all weight files.

    Raises:
        InvalidCheckpoint: no weights, a missing or truncated shard, an index that does not match its shards; one
            sentence with the file and the tensor.
    """
    index = folder / INDEX_NAME
    if index.exists():
        tensors = _read_shards(folder, index)
        return Checkpoint(folder, index, tensors, _said_scheme(folder).found_in(tensors))
    single = folder / SINGLE_NAME
    if single.exists():
        tensors = read_header(single)
        return Checkpoint(folder, single, tensors, _said_scheme(folder).found_in(tensors))
    raise InvalidCheckpoint(_no_weights(folder))


def with_plain_names(checkpoint: Checkpoint, architecture: Architecture) -> Checkpoint:
    """Return the checkpoint with its tensors by the names that the family's table has; each keeps its stored name.

    An encoder that was saved beside a head of some kind has a prefix before all names, such as `bert.`.
    """
    prefix = architecture.optional_prefix
    if not prefix:
        return checkpoint
    tensors = {_plain(name.removeprefix(prefix)): stored for name, stored in checkpoint.tensors.items()}
    return msgspec.structs.replace(checkpoint, tensors=tensors)


def _plain(name: str) -> str:
    for old, new in OLD_SUFFIXES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_regular(path), type=dict[str, Any])
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"{path} is missing: {path.parent} is not a checkpoint folder") from error
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path} is not a JSON object: {error}") from error


def _read_shards(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InvalidCheckpoint(f"{index}: weight_map must map tensor names to file names")
    headers: dict[str, dict[str, StoredTensor]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if shard not in headers:
            headers[shard] = _read_shard(folder, index, name, shard)
        if name not in headers[shard]:
            raise InvalidCheckpoint(f"{folder / shard} has no tensor {name}, which {INDEX_NAME} places there")
        tensors[name] = headers[shard][name]
    return tensors


def _read_shard(folder: Path, index: Path, tensor: str, shard: str) -> dict[str, StoredTensor]:
    # A name with a path in it could reach files outside the folder.
    if Path(shard).name != shard or not shard.endswith(".safetensors"):
        raise InvalidCheckpoint(f"{index}: tensor {tensor} is placed in {shard!r}, which is no safetensors file name")
    if not (folder / shard).exists():
        raise InvalidCheckpoint(f"{folder / shard} is missing; {INDEX_NAME} places tensor {tensor} in it")
    return read_header(folder / shard)


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        return (
            f"{folder} has {pickled[0]} but no {SINGLE_NAME}; only safetensors are read, convert the checkpoint first"
        )
    return f"{folder / SINGLE_NAME} is missing, and there is no {INDEX_NAME} either"
