"""`DeviceSampler`: sample on a device that the host does not wait for.

Tokens are drawn from the plain logits first, before the host knows what rows ask for beyond that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.step_sampler import Masks, Sampled, places
from tokenmill.model.attention.row_extension import Sent
from tokenmill.model.sampling.draws import NO_TOKEN
from tokenmill.model.sampling.sampler import NOTHING_LEFT, SampledTokens, Sampler
from tokenmill.model.sampling.sampler import Masks as Bitmasks
from tokenmill.model.sampling.state import SamplingMetadata

if TYPE_CHECKING:
    from tokenmill.model.sampling.sampler import DrawKernel
    from tokenmill.platform.arrays import Array


@dataclass(frozen=True, slots=True)
class Drawn:
    """Logits, draws and tokens of S rows on a device that the host does not wait for.

    Attributes:
        logits: [S, V] of any float; overwritten if they are float32, else widened where a row asks for more.
        draws: [S, NUM_FIELDS] int64, the packed draws.
        token_ids: [S] int64, the result of `Sampler.draw` for these, perhaps in a graph.
    """

    logits: torch.Tensor
    draws: torch.Tensor
    token_ids: torch.Tensor


def sample_drawn(
    sampler: Sampler, source: Drawn, metadata: SamplingMetadata, token_table: Array, masks: Bitmasks | None = None
) -> SampledTokens:
    """Sample again where a row asks for more than its draw; see `Sampler.sample_logits`."""
    drawn = source.token_ids
    if masks is None and not metadata.needs_processing:
        return SampledTokens(drawn)
    logits = source.logits.float()
    sampled = sampler.sample_logits(logits, metadata, token_table, masks, source.draws, drawn)
    token_ids: torch.Tensor = sampled.token_ids
    # What the logits alone gave says whether they are numbers.
    token_ids = token_ids.where(token_ids >= 0, NOTHING_LEFT).where(drawn >= 0, NO_TOKEN)
    return SampledTokens(token_ids, sampled.logprobs)


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
        sampled = sample_drawn(self._sampler, source, metadata, self.tables.tokens, grammars)
        token_ids = sampled.token_ids
        if token_ids is not drawn:
            token_ids = self.enter(token_ids, source.draws)
        return Sampled(token_ids, sampled.logprobs, grammars)
