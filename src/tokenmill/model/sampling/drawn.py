"""Sampling from logits on a device, whose tokens are drawn before the host knows what rows ask for beyond that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tokenmill.model.sampling.draws import NO_TOKEN
from tokenmill.model.sampling.sampler import NOTHING_LEFT, Masks, SampledTokens, Sampler
from tokenmill.model.sampling.state import SamplingMetadata

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


@dataclass(frozen=True, slots=True)
class Drawn:
    """Logits, draws and tokens of S rows on a device that the host does not wait for.

    Attributes:
        logits: [S, V] of any float; overwritten if they are float32, else widened where a row asks for more.
        draws: [S, NUM_FIELDS] int64, the packed draws.
        token_ids: [S] int64, the result of `Sampler.draw` for these, perhaps in a graph.
    """

    logits: Tensor
    draws: Tensor
    token_ids: Tensor


def sample_drawn(
    sampler: Sampler, source: Drawn, metadata: SamplingMetadata, token_table: Array, masks: Masks | None = None
) -> SampledTokens:
    """Sample again where a row asks for more than its draw; see `Sampler.sample_logits`."""
    drawn = source.token_ids
    if masks is None and not metadata.needs_processing:
        return SampledTokens(drawn)
    logits = source.logits.float()
    sampled = sampler.sample_logits(logits, metadata, token_table, masks, source.draws, drawn)
    token_ids: Tensor = sampled.token_ids
    # What the logits alone gave says whether they are numbers.
    token_ids = token_ids.where(token_ids >= 0, NOTHING_LEFT).where(drawn >= 0, NO_TOKEN)
    return SampledTokens(token_ids, sampled.logprobs)
