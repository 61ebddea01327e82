"""A decoder whose requests begin with a clip of sound that all layers attend to (Whisper's).

    |<- clip_length positions of the clip ->|<- text: prompt and output ... |     of one request

Its positions are tokens like others to scheduler, pages and prefix cache: they count in admission, are computed in any
chunks, shared by requests with the same clip and given back at the end or a preemption. The decoder only stores their
keys and values, which it makes of the encoder's output; the layers run the text alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import torch

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.cross_attention import CrossLayer
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.kv_places import KVPlace
from tokenmill.model.models.layer import ResidualStream

if TYPE_CHECKING:
    from tokenmill.model.attention.protocol import AttentionBackend, ClipAttention


class TextStep(msgspec.Struct, frozen=True):
    """The text tokens of a step.

    Attributes:
        batch: of the requests that have some in the step; positions are counted behind the clip.
        outputs: [S] bool, which outputs of the step are of text tokens; those of the batch are the same in order.
    """

    batch: ForwardBatch
    outputs: torch.Tensor


class CrossDecoder(Decoder):
    """A `Decoder` with layers that attend to clips; on one rank, without adapters and drafts."""

    __slots__ = ()

    def _layer(self, index: int, place: KVPlace | int, kernels: Kernels) -> CrossLayer:
        architecture, own = self.architecture, kernels.of_layer(index)
        return CrossLayer(
            architecture.layers[index], place, architecture.hidden_size, self.rotary, own, self.collective
        )

    def forward(
        self, batch: ForwardBatch, attention: AttentionBackend, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run `Decoder.forward`; outputs at positions of clips, which nothing samples from, are zeros."""
        assert hidden is None and self.final_norm is not None, "one stage has all layers"
        layers, own = cast("list[CrossLayer]", self.layers), cast("ClipAttention", attention)
        if batch.media is not None and batch.media.embeddings is not None:
            slots, embeddings = batch.slots[batch.media.indices], batch.media.embeddings[:, 0]
            for layer in layers:
                layer.cross.store(embeddings, slots, own)
        dtype = getattr(torch, self._kernels.dtype)
        outputs = torch.zeros(len(batch.output_indices), self.architecture.hidden_size, dtype=dtype)
        text = text_of(batch, self.architecture.clip_length)
        if text is not None:
            outputs[text.outputs] = self._run(text.batch, own)
        return outputs

    def _run(self, text: ForwardBatch, attention: ClipAttention) -> torch.Tensor:
        """Run text tokens through the layers; return their normed outputs, [S, hidden_size]."""
        assert self.inputs is not None and self.final_norm is not None, "positions are learned"
        lengths = np.full_like(text.context_lens, self.architecture.clip_length)
        plan = attention.plan(text)
        across = attention.plan(msgspec.structs.replace(text, context_lens=lengths))
        stream = ResidualStream(self.inputs.forward(self.embed(text.token_ids), text))
        for layer in cast("list[CrossLayer]", self.layers):
            layer.forward_text(stream, attention, plan, across)
        return stream.normed(self.final_norm).index_select(0, text.output_indices)


def text_of(batch: ForwardBatch, clip_length: int) -> TextStep | None:
    """Return the tokens of a step behind the clips of their requests; None: there are no such tokens."""
    computed = batch.context_lens - batch.query_lens
    in_clips = np.clip(clip_length - computed, 0, batch.query_lens)
    lens = batch.query_lens - in_clips
    has_text = lens > 0
    if not has_text.any():
        return None
    within = np.arange(batch.query_starts[-1]) - np.repeat(batch.query_starts[:-1], batch.query_lens)
    is_text = within >= np.repeat(in_clips, batch.query_lens)
    places, requests = torch.from_numpy(np.flatnonzero(is_text)), torch.from_numpy(np.flatnonzero(has_text))
    numbers = torch.from_numpy(np.cumsum(is_text) - 1)
    outputs = torch.from_numpy(is_text)[batch.output_indices]
    starts = np.concatenate([[0], np.cumsum(lens[has_text])]).astype(np.int32)
    return TextStep(
        ForwardBatch(
            token_ids=batch.token_ids[places],
            positions=batch.positions[places] - clip_length,
            slots=batch.slots[places],
            page_table=batch.page_table[requests],
            query_lens=lens[has_text],
            context_lens=batch.context_lens[has_text],
            query_starts=starts,
            output_indices=numbers[batch.output_indices[outputs]],
        ),
        outputs,
    )
