"""Requests on shuffled pages, and the batches to run them: what a runner does, in its plainest form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from tokenmill.engine.runner.model import Model
from tokenmill.model.attention.backend import AttentionConfig
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend, AttentionLayer, AttentionSpec
from tokenmill.model.attention.registry import choose_attention
from tokenmill.model.kernels.heads import HeadNorms, RotaryTables
from tokenmill.model.kernels.states import StateMemory, StepStates, state_arrays, step_states
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.host_decoder import array_of
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.device_arrays import DeviceArrays

Chunks = Sequence[tuple[int, int]]
"""(request, tokens of it to run), in batch order."""


def states_of_step(memory: StateMemory, slots: np.ndarray, query_starts: np.ndarray, saves: Any = None) -> StepStates:
    """The states of a step on the host; see `state_arrays`."""
    arrays = state_arrays(slots, query_starts, saves)
    return step_states(memory, arrays, {name: torch.from_numpy(values) for name, values in arrays.items()})


def in_arrays(part: Any) -> Any:
    """A batch, or a part of one, with NumPy arrays in the place of tensors."""
    changed: dict[str, Any] = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, torch.Tensor):
            changed[name] = array_of(value)
        elif isinstance(value, msgspec.Struct):
            changed[name] = in_arrays(value)
    return msgspec.structs.replace(part, **changed)


def unrotated(length: int, head_dim: int, dtype: torch.dtype = torch.float32) -> RotaryTables:
    """Angles of zero at every position: attention without a rotary embedding."""
    cos = torch.ones(length, head_dim // 2, dtype=dtype)
    return RotaryTables(cos, torch.zeros_like(cos))


def make_attention(
    name: str, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype, **wanted: Any
) -> AttentionBackend:
    """The backend of this name on a CPU, with its KV cache."""
    names = {key: name_of(value) if key == "kv_dtype" else value for key, value in wanted.items()}
    config = AttentionConfig(spec, page_size, name_of(dtype), CpuPlatform(), **names)
    return choose_attention(name, config).make(num_pages)


def name_of(dtype: torch.dtype | str | None) -> Any:
    """The name of a dtype of torch."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def drawn_sights(rng: np.random.Generator, start: int, end: int) -> np.ndarray:
    """The last position that each token of [start, end) sees, int32, where text and images of any length alternate."""
    sights = np.arange(start, end, dtype=np.int32)
    at = start
    while at < end:
        first = at + int(rng.integers(0, 40))
        at = min(end, first + int(rng.choice([1, 2, 30, 100])))
        sights[max(0, first - start) : at - start] = at - 1
    return np.maximum(sights, np.arange(start, end, dtype=np.int32))


def attention_layers(
    spec: AttentionSpec,
    rotary: RotaryTables | None = None,
    norms: HeadNorms | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> list[AttentionLayer]:
    """As many layers as the KV memory has, all of one kind."""
    scale = spec.head_dim**-0.5
    return [AttentionLayer(index, scale, window, norms, rotary, sinks) for index in range(spec.num_layers)]


class PagedRequests:
    """Whole token sequences of known lengths, each with the pages it needs, in random order over one pool.

    Attributes:
        computed: tokens of each request that have run.
        num_pages: pages the pool must have, the reserved one and some spare ones among them.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], page_size: int, rng: np.random.Generator) -> None:
        self.sequences = [torch.tensor(sequence, dtype=torch.int64) for sequence in sequences]
        self.computed = [0] * len(sequences)
        self.page_size = page_size
        self.states: StateMemory | None = None
        held = [-(-len(sequence) // page_size) for sequence in sequences]
        self.num_pages = sum(held) + 4
        ids = 1 + rng.permutation(self.num_pages - 1)
        starts = np.cumsum([0, *held])
        self.pages = [ids[start : start + count] for start, count in zip(starts, held, strict=False)]

    def batch(self, chunks: Chunks) -> ForwardBatch:
        """The batch that runs these chunks, with logits of every token; counts them as computed."""
        begins = [self.computed[request] for request, _ in chunks]
        ends = [begin + count for begin, (_, count) in zip(begins, chunks, strict=True)]
        positions = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        slots = [
            self.pages[request][position // self.page_size] * self.page_size + position % self.page_size
            for (request, _), position in zip(chunks, positions, strict=True)
        ]
        table = np.zeros((len(chunks), -(-max(ends) // self.page_size)), dtype=np.int32)
        for row, ((request, _), end) in enumerate(zip(chunks, ends, strict=True)):
            held = -(-end // self.page_size)
            table[row, :held] = self.pages[request][:held]
            self.computed[request] = end
        query_lens = np.array([count for _, count in chunks], dtype=np.int32)
        tokens = [
            self.sequences[request][begin:end] for (request, _), begin, end in zip(chunks, begins, ends, strict=True)
        ]
        return ForwardBatch(
            token_ids=torch.cat(tokens),
            positions=torch.from_numpy(np.concatenate(positions)),
            slots=torch.from_numpy(np.concatenate(slots)),
            page_table=torch.from_numpy(table),
            query_lens=query_lens,
            context_lens=np.array(ends, dtype=np.int32),
            query_starts=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            output_indices=torch.arange(int(query_lens.sum())),
        )

    def keep_states(self, decoder: Decoder) -> None:
        """Give each request a state, if the decoder has recurrences: in slots in random order, one of which nobody owns
        and holds poison."""
        if not decoder.architecture.recurrences:
            return
        self.states = decoder.state_memory(len(self.sequences) + 1, DeviceArrays("cpu"))
        self.slots = np.random.default_rng(0).permutation(len(self.sequences) + 1)
        for states in self.states.layers:
            for state in states:
                tensor_over(state)[self.slots[-1]] = torch.nan

    def run(self, decoder: Model, attention: AttentionBackend, schedule: Sequence[Chunks]) -> list[torch.Tensor]:
        """Run the steps of a schedule; the logits of each request, [tokens it ran, vocab_size], if it ran any."""
        logits: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        if isinstance(decoder, Decoder):
            self.keep_states(decoder)
        for chunks in schedule:
            with torch.inference_mode():
                batch = self.batch(chunks)
                if self.states is not None:
                    slots = self.slots[[request for request, _ in chunks]]
                    batch = msgspec.structs.replace(
                        batch, states=states_of_step(self.states, slots, batch.query_starts)
                    )
                step = tensor_over(decoder.logits(decoder.forward(batch, attention)))
            for (request, _), rows in zip(chunks, step.split([count for _, count in chunks]), strict=True):
                logits[request].append(rows)
        return [torch.cat(rows) if rows else torch.empty(0) for rows in logits]


def random_schedule(lengths: Sequence[int], longest: int, rng: np.random.Generator) -> list[Chunks]:
    """Steps that run all tokens: each takes some of the unfinished requests, decodes and chunks of up to `longest`."""
    left, schedule = list(lengths), []
    while any(left):
        chunks = []
        for request in rng.permutation(len(left)).tolist():
            if left[request] and rng.random() < 0.8:
                count = 1 if rng.random() < 0.5 else int(rng.integers(1, min(longest, left[request]) + 1))
                left[request] -= count
                chunks.append((request, count))
        if chunks:
            schedule.append(chunks)
    return schedule
