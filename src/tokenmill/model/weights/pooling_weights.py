"""Load the layers behind pooled states, in float32: from files of their own, or from among the model's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.pooling.chain import Dense, Layer, LayerNorm, PoolingChain
from tokenmill.model.pooling.spec import (
    Activation,
    DenseSpec,
    LayerNormSpec,
    PoolingSpec,
    RowScoreSpec,
    Step,
    TokenScoreSpec,
)
from tokenmill.model.quantization.packed import dense
from tokenmill.model.quantization.stored_array import StoredArray, seeded_normal
from tokenmill.model.weights.checkpoint import Checkpoint, open_checkpoint
from tokenmill.model.weights.gguf.file import GgufFile, open_gguf
from tokenmill.model.weights.gguf.folder import LINK_NAME
from tokenmill.model.weights.gguf.values import read_rows
from tokenmill.model.weights.safetensors_header import StoredTensor
from tokenmill.model.weights.stored_part import read_mapped

Floats = npt.NDArray[np.float32]
_FLOATS = ("F32", "F16", "BF16", "F64")


class PoolingWeights:
    """Finds and reads the layers of a `PoolingSpec`.

    Args:
        folder: the checkpoint's. tokenizer: the folder whose tokenizer spells tokens.
        is_dummy: there are no weights: layers get random ones.
    """

    def __init__(self, folder: Path, architecture: Architecture, tokenizer: Path, is_dummy: bool = False) -> None:
        self._folder = folder
        self._architecture = architecture
        self._tokenizer = tokenizer
        self._is_dummy = is_dummy
        self._gguf: GgufFile | None = None
        self._checkpoint: Checkpoint | None = None
        if (folder / LINK_NAME).exists():
            self._gguf = open_gguf(folder / LINK_NAME)
        elif not is_dummy:
            self._checkpoint = open_checkpoint(folder).named_for(architecture)

    def load(self, spec: PoolingSpec) -> tuple[PoolingChain, int]:
        """Return the layers with their weights, and the numbers of a vector that comes out.

        Raises:
            InvalidCheckpoint: a tensor is missing, misshapen or quantized; names it.
        """
        size, layers = self._architecture.hidden_size * len(spec.modes), list[Layer]()
        for number, step in enumerate(spec.steps):
            is_last = number == len(spec.steps) - 1
            layer, size = self._layer(step, size, len(spec.labels) if spec.labels and is_last else None)
            layers.append(layer)
        if spec.labels and size != len(spec.labels):
            raise InvalidCheckpoint(f"{self._folder}: {size} scores are made, config.json names {len(spec.labels)}")
        return PoolingChain(layers, spec.task, spec.activation), size

    def _layer(self, step: Step, size: int, wanted: int | None) -> tuple[Layer, int]:
        """Return a layer for vectors of `size` numbers, and the size of its output; `wanted`: that, if it is known."""
        if isinstance(step, TokenScoreSpec):
            return Dense(self._token_row(step), None), 1
        if isinstance(step, RowScoreSpec):
            rows, _ = self._read(DenseSpec("", step.name, Activation.IDENTITY, False))
            return Dense(rows[step.true_row : step.true_row + 1] - rows[step.false_row : step.false_row + 1], None), 1
        if self._is_dummy:
            shape = (wanted or (step.sizes or (0, size))[1], size) if isinstance(step, DenseSpec) else (size,)
            weight: Floats = seeded_normal(shape, size**-0.5, 0).values
            bias: Floats | None = None
        else:
            weight, bias = self._read(step)
        if weight.shape[-1] != size or (bias is not None and bias.shape != weight.shape[:1]):
            raise InvalidCheckpoint(
                f"{self._place(step)}: {step.name} has shape {list(weight.shape)}, not [..., {size}]"
            )
        if isinstance(step, LayerNormSpec):
            return LayerNorm(weight, bias, step.eps), size
        if weight.ndim != 2 or (step.has_residual and weight.shape[0] != size):
            raise InvalidCheckpoint(f"{self._place(step)}: {step.name} of shape {list(weight.shape)} does not fit")
        return Dense(weight, bias, step.activation, step.has_residual), weight.shape[0]

    def _place(self, step: DenseSpec | LayerNormSpec) -> Path:
        return self._folder / step.folder

    def _read(self, step: DenseSpec | LayerNormSpec) -> tuple[Floats, Floats | None]:
        """Return weight and bias of a layer."""
        if self._gguf is not None and not step.folder:
            weight, bias = (self._in_gguf(f"{step.name}.{kind}") for kind in ("weight", "bias"))
        else:
            tensors = self._tensors(step.folder)
            weight, bias = (_in_tensors(tensors, f"{step.name}.{kind}") for kind in ("weight", "bias"))
        if weight is None or (bias is None and step.has_bias):
            missing = "weight" if weight is None else "bias"
            raise InvalidCheckpoint(
                f"{self._place(step)} has no tensor {step.name}.{missing}, which its config calls for"
            )
        return weight, None if step.has_bias is False else bias

    def _tensors(self, folder: str) -> Mapping[str, StoredTensor]:
        if folder or self._checkpoint is None:
            return open_checkpoint(self._folder / folder).tensors
        return self._checkpoint.tensors

    def _in_gguf(self, name: str) -> Floats | None:
        assert self._gguf is not None, "the weights lie in one"
        tensor = self._gguf.tensors.get(name)
        return None if tensor is None else dense(read_rows(tensor)).float32()

    def _token_row(self, step: TokenScoreSpec) -> Floats:
        """Return the row of weights, [1, hidden_size], of a score that tokens tell."""
        true, false = self._row(step.true_token), None if step.false_token == "" else self._row(step.false_token)
        return true if false is None else true - false

    def _row(self, token: int | str) -> Floats:
        """Return a token's row of the output head, [1, hidden_size]."""
        number = token if isinstance(token, int) else self._token_id(token)
        architecture = self._architecture
        if not 0 <= number < architecture.vocab_size:
            raise InvalidCheckpoint(f"{self._folder}: the token {token!r} is not in the model's vocabulary")
        if self._is_dummy:
            return seeded_normal((1, architecture.hidden_size), architecture.hidden_size**-0.5, number).values
        if self._gguf is not None:
            stored = self._gguf.tensors.get("output.weight") or self._gguf.tensors["token_embd.weight"]
            return dense(read_rows(stored.rows(number, 1))).float32()
        assert self._checkpoint is not None, "the weights lie in files of safetensors"
        names = architecture.weight_names
        tensors, head = self._checkpoint.tensors, WeightKey("head").name(names)
        stored_head = tensors.get(head)
        # A stored copy of the embedding may be left in the file of a model that ties both.
        if stored_head is None or (architecture.tie_embeddings and architecture.name.endswith("ForCausalLM")):
            stored_head = tensors[WeightKey("embedding").name(names)]
        return _floats(stored_head, lambda rows: rows[number : number + 1])

    def _token_id(self, token: str) -> int:
        """Return the id of a token by its spelling in tokenizer.json.

        Raises:
            InvalidCheckpoint: there is no such token.
        """
        stored = read_json(self._tokenizer, "tokenizer.json")
        vocabulary = stored.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        added = {entry.get("content"): entry.get("id") for entry in stored.get("added_tokens") or ()}
        found = added.get(token, vocabulary.get(token))
        if not isinstance(found, int):
            raise InvalidCheckpoint(f"{self._tokenizer}: the tokenizer has no token {token!r}, which tells the score")
        return found


def _in_tensors(tensors: Mapping[str, StoredTensor], name: str) -> Floats | None:
    """Return the tensor of a name, or of the one name that ends with it; None: there is none."""
    names = [name] if name in tensors else [one for one in tensors if one.endswith(f".{name}")]
    return _floats(tensors[names[0]]) if len(names) == 1 else None


def _floats(stored: StoredTensor, pick: Callable[[StoredArray], StoredArray] | None = None) -> Floats:
    if stored.dtype not in _FLOATS:
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}; supported: {', '.join(_FLOATS)}"
        )
    values = read_mapped(stored)
    return np.array((values if pick is None else pick(values)).float32())
