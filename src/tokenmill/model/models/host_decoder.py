"""A decoder that runs in torch on the CPU: the runner's arrays become tensors over the same memory here, and back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from tokenmill.model.attention.batch import BatchPages, ForwardBatch, MediaAngles, MediaTokens
from tokenmill.model.kernels.adapters import AdapterRows
from tokenmill.model.kernels.states import KeptInputs, StateMemory, StateRows, StepStates
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.platform.tensor_memory import array_of

if TYPE_CHECKING:
    from tokenmill.model.attention.protocol import AttentionBackend
    from tokenmill.model.models.decoder import Decoder
    from tokenmill.platform.arrays import Array

# What torch's kernels too read on the host.
HOST_FIELDS = frozenset({"query_lens", "context_lens", "query_starts", "spans"})


class HostDecoder:
    """A `Decoder` on the CPU that takes and gives NumPy arrays, bfloat16 as its bits."""

    __slots__ = ("_decoder", "_states")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._states: tuple[StateMemory, StateMemory] | None = None

    def forward(self, batch: ForwardBatch, attention: AttentionBackend, hidden: Array | None = None) -> Any:
        """Run `Decoder.forward` over the arrays' memory; return [S, hidden_size] in the decoder's dtype."""
        with torch.inference_mode():
            tensors: ForwardBatch = _in_tensors(batch)
            if batch.states is not None and tensors.states is not None:
                memory = self._memory_of(batch.states.memory)
                states = msgspec.structs.replace(tensors.states, memory=memory, inputs=_inputs(tensors.states.inputs))
                tensors = msgspec.structs.replace(tensors, states=states)
            start = None if hidden is None else tensor_over(hidden)
            return array_of(self._decoder.forward(tensors, attention, start))

    def fuse(self, taps: Array) -> Any:
        """Return what a draft head takes for tokens, [T, hidden_size] in the decoder's dtype."""
        with torch.inference_mode():
            return array_of(self._decoder.fuse(tensor_over(taps)))

    def logits(self, outputs: Array) -> Any:
        """Return the logits of this rank's tokens, [S, tokens] float32."""
        with torch.inference_mode():
            return array_of(self._decoder.logits(tensor_over(outputs)).float())

    def argmax(self, outputs: Array) -> Any:
        """Return the most likely of this rank's tokens, [S] int64; -1 where logits are NaN or infinite."""
        with torch.inference_mode():
            return array_of(self._decoder.argmax(tensor_over(outputs)))

    def best(self, outputs: Array) -> tuple[Any, Any]:
        """Return the most likely of this rank's tokens, [S] int64, and their logits, [S] float32."""
        with torch.inference_mode():
            ids, values = self._decoder.best(tensor_over(outputs))
            return array_of(ids), array_of(values)

    def replay(self, memory: StateMemory, inputs: KeptInputs, rows: StateRows) -> None:
        """Advance states by draft tokens that turned out to be right; see `Decoder.replay`."""
        with torch.inference_mode():
            tensors = _inputs(inputs)
            assert tensors is not None, "inputs become tensors"
            self._decoder.replay(self._memory_of(memory), tensors, _in_tensors(rows))

    def _memory_of(self, memory: StateMemory) -> StateMemory:
        """Return the memory of the states in tensors; made once, for a model has one."""
        if self._states is None or self._states[0] is not memory:
            tensors = copy.copy(memory)
            tensors.layers = [tuple(map(tensor_over, parts)) for parts in memory.layers]
            self._states = memory, tensors
        return self._states[1]


def _inputs(inputs: KeptInputs | None) -> KeptInputs | None:
    """Return the kept inputs of drafts with tensors in the place of arrays."""
    if inputs is None:
        return None
    layers = [tuple(map(tensor_over, parts)) for parts in inputs.layers]
    return KeptInputs(tensor_over(inputs.tokens) if isinstance(inputs.tokens, np.ndarray) else inputs.tokens, layers)


def _in_tensors(part: Any) -> Any:
    """Return a step's part with tensors in the place of arrays."""
    changed: dict[str, Any] = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, np.ndarray) and name not in HOST_FIELDS:
            changed[name] = tensor_over(value)
        elif isinstance(value, MediaTokens | MediaAngles | BatchPages | AdapterRows | StepStates | StateRows):
            changed[name] = _in_tensors(value)
    return msgspec.structs.replace(part, **changed)
