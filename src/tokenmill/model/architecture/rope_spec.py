"""The rotary position embedding of a layer, as plain frozen data: its base, its scaled forms, its share of a head."""

from __future__ import annotations

import msgspec


class LinearScaling(msgspec.Struct, frozen=True):
    """Rotary frequencies divided by `factor` (position interpolation)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True):
    """The scaling of Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a ramp between them.

    Attributes:
        original_max_position: context of the pretraining, in tokens; wavelengths are judged against it.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class YarnScaling(msgspec.Struct, frozen=True):
    """YaRN (Peng et al. 2023): a ramp between interpolated and kept frequencies, and a factor on cos and sin.

    Attributes:
        beta_fast, beta_slow: rotations over the original context where the ramp begins and ends.
        attention_factor: multiplies cos and sin.
        truncate: the ends of the ramp are rounded to whole dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


class LongRopeScaling(msgspec.Struct, frozen=True):
    """LongRoPE (Ding et al. 2024): each frequency divided by a factor of its own, and a factor on cos and sin.

    Attributes:
        short, long: the factors for contexts up to that of the pretraining, and for longer ones.
        original_max_position: context of the pretraining, in tokens.
        is_long: the long factors are used. All requests have the same, so that their KV can be shared.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    is_long: bool

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors in use."""
        return self.long if self.is_long else self.short


class ProportionalScaling(msgspec.Struct, frozen=True):
    """The first `share` of a head's pairs turn, as fast as if all did, over `factor`; the others stay (Gemma 4)."""

    share: float
    factor: float = 1.0


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary position embedding.

    Attributes:
        scaling: None: the plain form.
        share: of each head that turns, its first numbers.
    """

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling | None = None
    share: float = 1.0

    def num_rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head turn."""
        return int(head_dim * self.share)
