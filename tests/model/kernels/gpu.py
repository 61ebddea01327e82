"""Choose where the Triton kernels of a test run: on a GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = DEVICE == "cpu"
# The interpreter cuts float32 to bfloat16 where a GPU rounds.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit on a GPU; interpreted, products are numpy's, whose last bit depends on a row's place in its tile."""
    return torch.allclose(got, want, rtol=1e-5, atol=1e-6) if IS_INTERPRETED else torch.equal(got, want)


if IS_INTERPRETED:
    from tests.model.kernels.interpreter import replace_language_once

    replace_language_once()
