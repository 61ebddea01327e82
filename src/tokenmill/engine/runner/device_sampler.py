"""`DeviceSampler`: sample on a device that the host does not wait for.

Tokens are drawn from the plain logits first, before the host knows what rows ask for beyond that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.step_sampler import Masks, Sampled, places
from tokenmill.model.attention.row_extension import AddLogits, Sent
from tokenmill.model.sampling.sampler import Drawn, Sampler, sample_drawn
from tokenmill.model.sampling.state import SamplingMetadata

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tokenmill.model.sampling.sampler import DrawKernel


class DeviceSampler:
    """Samples on a device without the host: from the plain logits, as a graph may, and again where a row asks for more.

    Args:
        draw: the kernel that draws.
        share: shares the tokens with other ranks.
        adding: add to the logits of each pass, in this order.
    """

    def __init__(
        self,
        model: Model,
        tables: RowTables,
        draw: DrawKernel,
        share: Callable[[torch.Tensor], torch.Tensor] = lambda token_ids: token_ids,
        adding: Sequence[AddLogits] = (),
    ) -> None:
        self.tables = tables
        self._model = model
        self._sampler = Sampler(draw)
        self._share = share
        self._adding = adding

    def sample(
        self, outputs: torch.Tensor, samples: Samples, metadata: SamplingMetadata, sent: Sent, masks: Masks
    ) -> Sampled:
        """Sample from outputs [S, hidden_size] of the model and enter the tokens into the table."""
        logits = self.logits(outputs, sent["draws"], samples.rows)
        return self.sample_drawn(logits, self.draw(logits, sent["draws"]), samples, metadata, sent, masks)

    def logits(self, outputs: torch.Tensor, draws: torch.Tensor, rows: npt.NDArray[np.integer]) -> torch.Tensor:
        """Return the logits of outputs [S, hidden_size], with what is added to them for `rows`, [S] on the host."""
        logits = self._model.logits(outputs)
        for add in self._adding:
            add(outputs, logits, places(draws)[0], rows)
        return logits

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
        sampled = sample_drawn(self._sampler, source, metadata, self.tables.tokens, grammars)
        token_ids = sampled.token_ids
        if token_ids is not drawn:
            token_ids = self.enter(token_ids, source.draws)
        return Sampled(token_ids, sampled.logprobs, grammars)
