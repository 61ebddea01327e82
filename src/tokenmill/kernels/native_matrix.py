"""Matrices packed for the native kernels: the face of native/isa/linear.cpp; see `TorchMatrix` and reference.py."""

from __future__ import annotations

import importlib
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from tokenmill.kernels.formats import Format
from tokenmill.kernels.native import MODULE
from tokenmill.kernels.protocol import MatrixRole
from tokenmill.kernels.quantized import QuantizedRows, Rows, dense
from tokenmill.platform.memory import zeros

if TYPE_CHECKING:
    from tokenmill._native import Kernels, Packed

GROUP = 32
"""Inputs that share a scale in int4; a checkpoint's groups are taken as they are if they are multiples of it."""


class Element(IntEnum):
    """Element types that the kernels read and write; the numbers are those of native/kernel_table.h."""

    BF16 = 0
    FLOAT32 = 1
    FLOAT16 = 2


ELEMENTS = {torch.bfloat16: Element.BF16, torch.float32: Element.FLOAT32, torch.float16: Element.FLOAT16}


class PackedMatrix:
    """A weight W [out_size, in_size] in panels of 16 rows; see `Matrix`. Activations are bf16.

    Integer weights meet int8 activations, which are rounded for each token (INT8) or for each 32 inputs of it (INT4,
    INT4_OFFSET); kernels/reference.py has the arithmetic. The bits of a result depend on its own row of x and on the
    instruction set, not on the number of rows or threads.

    Args:
        kernels: the native kernels that fill and multiply it.
        shape: out_size, in_size.
        role: a GATED matrix is laid out for `gated` and can do nothing else.
        format: how the weights are stored.

    Attributes:
        packed: its shape, and where its bytes are.
    """

    def __init__(
        self,
        kernels: Kernels,
        shape: tuple[int, int],
        role: MatrixRole = MatrixRole.LINEAR,
        format: Format = Format.BF16,
    ) -> None:
        self.shape = shape
        self._kernels = kernels
        self._is_gated = role is MatrixRole.GATED
        self._format = format
        self.packed: Packed = importlib.import_module(MODULE).Packed(format, *shape, self._is_gated)
        self.num_bytes = self.packed.num_bytes
        # The padding has to be zeros: it is multiplied too.
        self._memory = zeros((self.num_bytes,), torch.uint8, "cpu")
        self.packed.place(self._memory.data_ptr())

    def fill(self, start: int, rows: Rows) -> None:
        """See `Matrix.fill`; rows that are quantized as this matrix is are taken as they are, others are rounded."""
        count, size = rows.shape
        if size != self.shape[1] or start < 0 or start + count > self.shape[0]:
            raise ValueError(f"rows {start} to {start + count} of {size} inputs do not fit a matrix of {self.shape}")
        if isinstance(rows, QuantizedRows) and self._takes(rows):
            self._fill_integers(start, rows)
        else:
            self._fill_floats(start, dense(rows).cpu())

    def _fill_floats(self, start: int, rows: torch.Tensor) -> None:
        if rows.dtype not in ELEMENTS:
            rows = rows.float()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        element = ELEMENTS[rows.dtype]
        self._kernels.pack(self.packed, start, rows.data_ptr(), rows.shape[0], rows.stride(0), element)

    def _fill_integers(self, start: int, rows: QuantizedRows) -> None:
        values = rows.values.cpu().contiguous()
        scales = rows.scales.float().cpu().contiguous()
        offsets = None if rows.offsets is None else rows.offsets.float().cpu().contiguous()
        self._kernels.pack_integers(
            self.packed,
            start,
            values.data_ptr(),
            values.shape[0],
            scales.data_ptr(),
            0 if offsets is None else offsets.data_ptr(),
            scales.shape[1],
        )

    def _takes(self, rows: QuantizedRows) -> bool:
        match self._format:
            case Format.INT8:
                return rows.bits == 8 and rows.scales.shape[1] == 1 and rows.offsets is None
            case Format.INT4_OFFSET:
                return rows.bits == 4 and rows.group_size % GROUP == 0
            case Format.INT4:
                is_centred = rows.offsets is not None and torch.equal(rows.offsets, -8 * rows.scales)
                return rows.bits == 4 and rows.group_size % GROUP == 0 and is_centred
        return False

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Matrix.multiply`."""
        return self._linear(x, torch.empty(x.shape[0], self.shape[0], dtype=torch.bfloat16), bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Matrix.gated`."""
        return self._linear(x, torch.empty(x.shape[0], self.shape[0] // 2, dtype=torch.bfloat16), bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See `Matrix.logits`."""
        return self._linear(x, torch.empty(x.shape[0], self.shape[0]), None)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See `Matrix.argmax`; the logits are not kept."""
        x = self._checked(x)
        ids = torch.empty(x.shape[0], dtype=torch.int64)
        self._kernels.argmax(self.packed, x.data_ptr(), x.shape[0], x.stride(0), ids.data_ptr())
        return ids

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Matrix.lookup`; the ids are not checked."""
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], self.shape[1], dtype=torch.bfloat16)
        self._kernels.lookup(self.packed, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    def _linear(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x = self._checked(x)
        if bias is not None and (bias.dtype != torch.bfloat16 or not bias.is_contiguous()):
            bias = bias.to(torch.bfloat16).contiguous()
        self._kernels.linear(
            self.packed,
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            ELEMENTS[out.dtype],
            0 if bias is None else bias.data_ptr(),
        )
        return out

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != self.shape[1] or x.dtype != torch.bfloat16 or not x.is_cpu:
            raise ValueError(f"a matrix of {self.shape} takes bfloat16 rows on the CPU, not {x.dtype} {tuple(x.shape)}")
        return x if x.stride(1) == 1 else x.contiguous()
