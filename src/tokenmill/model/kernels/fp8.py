"""Eight-bit floats: weights with a scale per output, activations with a scale per token (W8A8, e4m3).

Weights are quantized when they are loaded, activations in each product. Products run on GPUs that support them.
"""

from __future__ import annotations

import torch

from tokenmill.model.kernels.stored_tensors import floats
from tokenmill.model.kernels.torch_kernels import TorchWeight
from tokenmill.model.quantization.packed import Rows

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# The products take sizes that are multiples of this.
ALIGNMENT = 16


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [n, size] to e4m3 [n, size] and scales [n, 1] float32; each row's maximum becomes the format's."""
    wide = x.float()
    # Rows of zeros keep a scale that can be divided by.
    scales = wide.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / LARGEST
    return (wide / scales).clamp_(-LARGEST, LARGEST).to(FP8), scales


class Fp8Weight(TorchWeight):
    """A `LinearWeight` of eight-bit floats.

    Attributes:
        weight: [out_size, in_size] e4m3.
        scales: [out_size, 1] float32.
    """

    __slots__ = ("scales",)

    def __init__(self, out_size: int, in_size: int, device: str) -> None:
        super().__init__(out_size, in_size, FP8, device)
        self.scales = torch.empty(out_size, 1, dtype=torch.float32, device=device)
        self.num_bytes = self.weight.nbytes + self.scales.nbytes

    def load_rows(self, start: int, rows: Rows | torch.Tensor) -> None:
        """Quantize rows and store them from row `start` on."""
        part = slice(start, start + rows.shape[0])
        values, scales = quantize_rows(floats(rows).to(self.weight.device))
        self.weight[part].copy_(values)
        self.scales[part].copy_(scales)

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(x)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Quantize x per row and return x W^T + bias in x's dtype."""
        values, scales = self._quantize(x)
        product = torch._scaled_mm(
            values, self.weight.t(), scale_a=scales, scale_b=self.scales.t(), out_dtype=x.dtype, use_fast_accum=True
        )
        return product if bias is None else product.add_(bias)
