"""Measure how large the inputs of each matrix are on a short text, so that few bits are spent where they matter.

The error of an output is the sum of its weights' errors, each times an input. So the square of a weight's error counts
as much as its input is large: the mean of its squares over a text (llama.cpp calls it an importance matrix). The model
runs in int8, layer after layer, each of which is in memory only for its own turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.kernels.observing import ObservedWeight, ObservingKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.host_model import on_host
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.error_costs import DAMPING, SPAN, ErrorCosts, feedback_of
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.sharding.collective import Alone
from tokenmill.model.sharding.shard import Shard
from tokenmill.model.weights.loader import plan_model

TEXT = Path(__file__).with_name("importance_text.txt")
# Tokens of the text that run, in sequences of at most this length.
MOST_TOKENS, SEQUENCE = 1024, 256
# Inputs of a matrix that are kept: all of these, and the first token of each sequence.
MOST_ROWS = MOST_TOKENS + MOST_TOKENS // SEQUENCE + 2
# The least importance where the mean is 1: an input that a short text does not use may matter elsewhere.
LEAST = 1e-3
# An expert that meets fewer tokens than this has all inputs weigh the same.
FEWEST_ROWS = 32

MakeAttention = Callable[[AttentionSpec, int], AttentionBackend]


class _Stage(Alone):
    """One layer of a model as a stage of its own."""

    def __init__(self, layer: int, num_layers: int) -> None:
        self.shard = Shard(stage=layer, num_stages=num_layers)


class InputImportance(msgspec.Struct, frozen=True, dict=True):
    """The measuring of a model's inputs; nothing runs before `measure`.

    Attributes:
        tokenizer: its file.
        make_attention: makes attention over this many pages.
        progress: called with (layers done, layers in all).
        has_feedback: errors are fed back, too, in the matrices of layers; not in the vocabulary, whose rows are
            embeddings as well.
    """

    folder: Path
    tokenizer: Path
    architecture: Architecture
    kernels: NativeKernels
    load_format: str
    page_size: int
    make_attention: MakeAttention
    progress: Callable[[int, int], None]
    has_feedback: bool = False

    @cached_property
    def digest(self) -> str:
        """Name of the text and of its tokens; what is packed depends on it."""
        made_by = f"{SPAN} {DAMPING}".encode() if self.has_feedback else b""
        return blake2b(made_by + TEXT.read_bytes() + self.tokenizer.read_bytes(), digest_size=16).hexdigest()

    @property
    def _head(self) -> WeightKey:
        return WeightKey("embedding" if self.architecture.tie_embeddings else "head")

    def measure(self) -> Mapping[WeightKey, ErrorCosts]:
        """Return the costs of errors in each matrix; importances have a mean of about 1."""
        return self._measured

    @cached_property
    def _measured(self) -> Mapping[WeightKey, ErrorCosts]:
        sequences = self._sequences()
        count, found = len(self.architecture.layers), dict[WeightKey, ErrorCosts]()
        hidden: npt.NDArray[np.uint16] | None = None
        for layer in range(count):
            self.progress(layer, count)
            decoder = self._load(layer, count)
            batch = _batch(sequences, self.page_size)
            num_pages = int(batch.page_table.max()) + 1
            attention = self.make_attention(decoder.attention_spec, num_pages)
            hidden = on_host(decoder, attention).forward(batch, attention, hidden)
            found |= _importance(decoder)
        self.progress(count, count)
        if hidden is not None:
            # Of the last stage: normed, the inputs of the head.
            numbers = StoredArray(hidden, "BF16").float32()
            found[self._head] = _costs(np.square(numbers, dtype=np.float64).sum(0))
        return found

    def _sequences(self) -> list[list[int]]:
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids[:MOST_TOKENS]
        whole, bare = (tokenizer.encode("a", add_special_tokens=is_added).ids for is_added in (True, False))
        first = whole[:1] if whole[:1] != bare[:1] else []
        most = min(SEQUENCE, self.architecture.max_position) - len(first)
        return [[*first, *ids[start : start + most]] for start in range(0, len(ids), most)]

    def _load(self, layer: int, count: int) -> Decoder:
        kernels, stage = ObservingKernels(self.kernels, MOST_ROWS if self.has_feedback else 0), _Stage(layer, count)
        plan = plan_model(self.folder, self.architecture, kernels, self.load_format, stage, is_again=True)
        # The head comes with the first layer, and is not run.
        return msgspec.structs.replace(
            plan, reads=[read for read in plan.reads or () if read.key.role != "head"]
        ).load()


def _importance(decoder: Decoder) -> dict[WeightKey, ErrorCosts]:
    found, of_matrices = dict[WeightKey, ErrorCosts](), dict[int, ErrorCosts]()
    for target in decoder.targets():
        matrix = target.matrix
        if isinstance(matrix, ObservedWeight) and matrix.num_rows >= FEWEST_ROWS and 0 < matrix.squares.sum() < np.inf:
            if id(matrix) not in of_matrices:
                of_matrices[id(matrix)] = _costs(matrix.squares, matrix.first)
            found[target.key] = of_matrices[id(matrix)]
    return found


def _costs(squares: npt.NDArray[np.float64], inputs: npt.NDArray[np.uint16] | None = None) -> ErrorCosts:
    """Return the costs by the sums of squares of inputs, and by the first of these in bfloat16, if any were kept."""
    importance = np.maximum(squares / squares.mean(), LEAST).astype(np.float32)
    if inputs is None or not len(inputs):
        return ErrorCosts(importance)
    return ErrorCosts(importance, feedback_of(StoredArray(inputs, "BF16").float32()))


def _batch(sequences: list[list[int]], page_size: int) -> ForwardBatch:
    """Return a step that runs whole sequences, each on pages of its own from page 1 on."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    held = -(-int(lengths.max()) // page_size)
    table = 1 + np.arange(len(sequences) * held, dtype=np.int32).reshape(len(sequences), held)
    positions = [np.arange(length, dtype=np.int64) for length in lengths]
    slots = [
        row[position // page_size] * page_size + position % page_size
        for row, position in zip(table, positions, strict=True)
    ]
    return ForwardBatch(
        token_ids=np.array([token for sequence in sequences for token in sequence], np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots).astype(np.int64),
        page_table=table,
        query_lens=lengths,
        context_lens=lengths,
        query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        output_indices=np.arange(int(lengths.sum()), dtype=np.int64),
    )
