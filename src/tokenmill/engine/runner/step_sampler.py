"""Turn the outputs of a pass into tokens: the one interface between the runner and `sampling`.

`HostSampler` runs where the host does the work and may look at what was drawn. `DeviceSampler` issues all of it to a
device that the host does not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.transport import Transport
from tokenmill.model.attention.row_extension import Sent
from tokenmill.model.kernels.adapter_parts import LinearAdapter
from tokenmill.model.kernels.torch_kernels import argmax
from tokenmill.model.sampling.draws import column
from tokenmill.model.sampling.grammar_rows import GrammarStep
from tokenmill.model.sampling.logprobs import LogprobTensors
from tokenmill.model.sampling.sampler import DrawKernel, Drawn, Outputs, Sampler
from tokenmill.model.sampling.state import SamplingMetadata

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array

Masks = Callable[[], GrammarStep | None]
"""The grammars of a step. Asked for once its pass is issued: to know them the host may have to wait."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens and log probabilities of S samples.

    Attributes:
        token_ids: [S] int64, `NO_TOKEN` or `NOTHING_LEFT` where there is none.
        logprobs: of the samples that asked; None: none did.
        masks: the grammars that need the tokens; None: absent.
    """

    token_ids: torch.Tensor
    logprobs: LogprobTensors | None = None
    masks: GrammarStep | None = None

    def on_host(self, transport: Transport) -> Sampled:
        """Begin to copy the tensors to the host, and return them as there."""
        told = self.logprobs
        if told is None:
            return replace(self, token_ids=transport.fetch(self.token_ids)[0])
        numbers = (told.indices, told.token_ids, told.logprobs, told.ranks.long(), told.top_ids, told.top_logprobs)
        token_ids, indices, *others = transport.fetch(self.token_ids, *numbers)
        return replace(self, token_ids=token_ids, logprobs=LogprobTensors(indices, told.counts, *others))


class StepSampler(Protocol):
    """Samples the tokens of a step and enters them into the token table, where the next step finds them."""

    def sample(
        self, outputs: torch.Tensor, samples: Samples, metadata: SamplingMetadata, sent: Sent, masks: Masks
    ) -> Sampled:
        """Sample from outputs [S, hidden_size] of the model.

        Args:
            sent: arrays on the device, including `draws` of the metadata.
        """


class HostSampler:
    """Samples on the host, where it may look at what was drawn.

    Args:
        native: kernels that draw; None: torch draws.
        heads: see `RowState`.
    """

    def __init__(
        self,
        model: Model,
        tables: RowTables,
        native: _native.Kernels | None = None,
        heads: Sequence[Callable[[int], LinearAdapter | None]] = (),
    ) -> None:
        self._heads = tuple(heads)
        self._model = model
        self._tables = tables
        self._sampler = Sampler(native=native)

    def sample(
        self, outputs: torch.Tensor, samples: Samples, metadata: SamplingMetadata, sent: Sent, masks: Masks
    ) -> Sampled:
        """Sample from outputs [S, hidden_size] of the model and enter the tokens into the table."""
        grammars = masks()
        source = Outputs(self._model, outputs, self._adapted(samples))
        sampled = self._sampler.sample(source, metadata, self._tables.tokens, grammars)
        self._tables.write_tokens(*places(sent["draws"]), sampled.token_ids.numpy())
        return Sampled(sampled.token_ids, sampled.logprobs, grammars)

    def _adapted(self, samples: Samples) -> list[tuple[torch.Tensor, AdaptedHead]]:
        """Return the samples whose rows add to the head, by row."""
        found = []
        for head_of in self._heads:
            for row in np.unique(samples.rows).tolist():
                addition = head_of(row)
                if addition is not None:
                    places = torch.from_numpy(np.flatnonzero(samples.rows == row))
                    found.append((places, AdaptedHead(self._model, addition)))
        return found


class AdaptedHead:
    """The head of a model with a row's addition."""

    def __init__(self, model: Model, adapter: LinearAdapter) -> None:
        self._model = model
        self._adapter = adapter

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the model's logits in float32 with the addition."""
        return self._adapter.add(outputs, self._model.logits(outputs).float())

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the tokens with the largest adapted logits."""
        return argmax(self.logits(outputs))


class DeviceSampler:
    """Samples on a device without the host: from the plain logits, as a graph may, and again where a row asks for more.

    Args:
        draw: the kernel that draws.
        share: shares the tokens with other ranks.
    """

    def __init__(
        self,
        model: Model,
        tables: RowTables,
        draw: DrawKernel,
        share: Callable[[torch.Tensor], torch.Tensor] = lambda token_ids: token_ids,
    ) -> None:
        self.tables = tables
        self._model = model
        self._sampler = Sampler(draw)
        self._share = share

    def sample(
        self, outputs: torch.Tensor, samples: Samples, metadata: SamplingMetadata, sent: Sent, masks: Masks
    ) -> Sampled:
        """Sample from outputs [S, hidden_size] of the model and enter the tokens into the table."""
        logits = self._model.logits(outputs)
        return self.sample_drawn(logits, self.draw(logits, sent["draws"]), samples, metadata, sent, masks)

    def draw(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Sample from plain logits [S, V], and enter the tokens into the table."""
        return self.enter(self._sampler.draw(logits, draws), draws)

    def enter(self, token_ids: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Share sampled tokens with the other ranks and enter them into the table."""
        token_ids = self._share(token_ids)
        self.tables.write_tokens(*places(draws), token_ids)
        return token_ids

    def sample_drawn(
        self,
        logits: torch.Tensor,
        drawn: torch.Tensor,
        samples: Samples,
        metadata: SamplingMetadata,
        sent: Sent,
        masks: Masks,
    ) -> Sampled:
        """Sample again with all that rows ask for and their masks; keep `drawn` if no row asks for more."""
        grammars = masks()
        if samples.drafts is not None and (grammars is not None or metadata.needs_processing):
            self.tables.write_drafts(sent)  # the first draw has taken their places, and penalties look at them
        source = Drawn(logits, sent["draws"], drawn)
        sampled = self._sampler.sample(source, metadata, self.tables.tokens, grammars)
        token_ids = sampled.token_ids
        if token_ids is not drawn:
            token_ids = self.enter(token_ids, source.draws)
        return Sampled(token_ids, sampled.logprobs, grammars)


def places(draws: Array) -> tuple[Array, Array]:
    """Return the rows and positions of the tokens that packed draws sample, [S] int64 each."""
    return column(draws, "row"), column(draws, "position")
