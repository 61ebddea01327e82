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
    """Bit for bit on a GPU; interpreted, products are numpy's, whose last bit depends on a row's place in its tile.

    A sum that is almost zero has terms as large as those of others, hence their last bit.
    """
    if not IS_INTERPRETED:
        return torch.equal(got, want)
    largest = float(want.abs().nan_to_num(0, 0, 0).max()) if want.numel() else 0.0
    return torch.allclose(got, want, rtol=1e-5, atol=1e-6 * max(1.0, largest))


if IS_INTERPRETED:
    from tests.model.kernels.interpreter import replace_language_once

    replace_language_once()
