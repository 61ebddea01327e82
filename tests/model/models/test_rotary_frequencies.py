"""The frequencies of rotary embeddings, pinned: a change of one bit would change every model's tokens."""

from __future__ import annotations

from hashlib import blake2b

import mpmath
import numpy as np
import pytest

from tokenmill.model.architecture.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from tokenmill.model.models.rotary_frequencies import inverse_frequencies

# Of theta 10,000 and heads of 64: the bits of each number.
PLAIN = """
3f800000 3f3ff911 3f0ff59a 3ed7e89b 3ea1e89b 3e72d423 3e361887 3e088d77
3dcccccd 3d99940d 3d6655c2 3d2cba15 3d0186e3 3cc2434f 3c91ad39 3c5a7bf2
3c23d70a 3bf5b9b0 3bb8449c 3b8a2e77 3b4f3e38 3b1b690d 3ae91528 3aaec98e
3a83126f 3a44948c 3a136a16 39dd1725 39a5cb60 3978a815 393a7753 390bd472
"""
# What a digest of the bits is, for theta, the numbers of a head and the scaled forms.
PINNED = [
    (RopeSpec(1e4), 128, "7dfa5a502a0792fb"),
    (RopeSpec(5e5), 64, "61f46c544247b145"),
    (RopeSpec(1e6), 128, "b20f860ae0cba727"),
    (RopeSpec(1e4, LinearScaling(3.0)), 64, "70ccf729ff5e4570"),
    (RopeSpec(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)), 128, "9e1b9a6b8d07658b"),
    (RopeSpec(1e6, YarnScaling(4.0, 32768, 32.0, 1.0, 1.1386, True)), 128, "15ed7c1de15167f2"),
    (RopeSpec(150000.0, YarnScaling(32.0, 4096, 32.0, 1.0, 1.34, False)), 64, "bbf09626df6d7926"),
    (RopeSpec(1e6, ProportionalScaling(0.25)), 512, "882f31007e03b07b"),
]


def test_plain_frequencies_are_these() -> None:
    assert [f"{bits:08x}" for bits in inverse_frequencies(RopeSpec(1e4), 64).view(np.uint32)] == PLAIN.split()


@pytest.mark.parametrize(("spec", "head_dim", "digest"), PINNED)
def test_frequencies_have_the_bits_that_they_had(spec: RopeSpec, head_dim: int, digest: str) -> None:
    found = inverse_frequencies(spec, head_dim)
    assert found.dtype == np.float32 and found.shape == (head_dim // 2,)
    assert blake2b(found.astype("<f4").tobytes(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize("theta", [1e4, 150000.0, 5e5, 1e6, 1e7])
def test_powers_are_the_exact_ones_rounded_once(theta: float) -> None:
    exponents = np.arange(0, 128, 2, dtype=np.float32) / np.float32(128)
    with mpmath.workdps(40):
        powers = np.array([float(mpmath.power(theta, one)) for one in exponents.tolist()], dtype=np.float32)
    assert np.array_equal(inverse_frequencies(RopeSpec(theta), 128), np.float32(1) / powers)


def test_numbers_that_stay_have_frequency_0_and_long_factors_divide() -> None:
    assert (inverse_frequencies(RopeSpec(1e4, share=0.25), 64)[8:] == 0).all()
    scaling = LongRopeScaling((1.0, 2.0), (3.0, 5.0), 4096, 1.1, is_long=True)
    plain = inverse_frequencies(RopeSpec(1e4), 4)
    assert np.array_equal(inverse_frequencies(RopeSpec(1e4, scaling), 4), plain / np.array([3, 5], dtype=np.float32))
