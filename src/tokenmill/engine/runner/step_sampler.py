"""Turn the outputs of a pass into tokens: the one interface between the runner and `sampling`.

`HostSampler` runs where the host does the work and may look at what was drawn. A `DeviceSampler` issues all of it to a
device that the host does not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.transport import Transport
from tokenmill.model.attention.row_extension import Sent
from tokenmill.model.sampling.draws import column
from tokenmill.model.sampling.grammar_rows import GrammarStep
from tokenmill.model.sampling.logprobs import LogprobArrays
from tokenmill.model.sampling.sampler import AdaptedHead, Outputs, Sampler
from tokenmill.model.sampling.state import SamplingMetadata

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill import _native
    from tokenmill.model.kernels.adapter_parts import HeadAddition
    from tokenmill.platform.arrays import Array

Masks = Callable[[], GrammarStep | None]
"""The grammars of a step. Asked for once its pass is issued: to know them the host may have to wait."""


class Sampled(msgspec.Struct, frozen=True):
    """Tokens and log probabilities of S samples.

    Attributes:
        token_ids: [S] int64, `NO_TOKEN` or `NOTHING_LEFT` where there is none.
        logprobs: of the samples that asked; None: none did.
        masks: the grammars that need the tokens; None: absent.
    """

    token_ids: Array
    logprobs: LogprobArrays | None = None
    masks: GrammarStep | None = None

    def on_host(self, transport: Transport) -> Sampled:
        """Begin to copy the arrays to the host, and return them as there."""
        told = self.logprobs
        if told is None:
            return msgspec.structs.replace(self, token_ids=transport.fetch(self.token_ids)[0])
        token_ids, *others = transport.fetch(self.token_ids, *told.numbers)
        return msgspec.structs.replace(self, token_ids=token_ids, logprobs=told.with_numbers(others))


class StepSampler(Protocol):
    """Samples the tokens of a step and enters them into the token table, where the next step finds them."""

    def sample(self, outputs: Array, samples: Samples, metadata: SamplingMetadata, sent: Sent, masks: Masks) -> Sampled:
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
        heads: Sequence[Callable[[int], HeadAddition | None]] = (),
    ) -> None:
        self._heads = tuple(heads)
        self._model = model
        self._tables = tables
        self._sampler = Sampler(native=native)

    def sample(self, outputs: Array, samples: Samples, metadata: SamplingMetadata, sent: Sent, masks: Masks) -> Sampled:
        """Sample from outputs [S, hidden_size] of the model and enter the tokens into the table."""
        grammars = masks()
        source = Outputs(self._model, outputs, self._adapted(samples))
        sampled = self._sampler.sample(source, metadata, self._tables.tokens, grammars)
        self._tables.write_tokens(*places(sent["draws"]), sampled.token_ids)
        return Sampled(sampled.token_ids, sampled.logprobs, grammars)

    def _adapted(self, samples: Samples) -> list[tuple[npt.NDArray[np.int64], AdaptedHead]]:
        """Return the samples whose rows add to the head, by row."""
        found = []
        for head_of in self._heads:
            for row in np.unique(samples.rows).tolist():
                addition = head_of(row)
                if addition is not None:
                    found.append((np.flatnonzero(samples.rows == row), AdaptedHead(self._model, addition)))
        return found


def places(draws: Array) -> tuple[Array, Array]:
    """Return the rows and positions of the tokens that packed draws sample, [S] int64 each."""
    return column(draws, "row"), column(draws, "position")
