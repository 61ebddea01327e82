"""How native kernels store the weights of a model: a format for each role of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from tokenmill.kernels.protocol import MatrixRole


class Format(IntEnum):
    """How a packed matrix is stored; the numbers and the layouts are those of native/packed.h."""

    BF16 = 0
    INT8 = 1  # a scale for each output
    INT4 = 2  # a scale for each 32 inputs of an output
    INT4_OFFSET = 3  # and an offset


Formats = Mapping[MatrixRole, Format]


def formats(linear: Format, vocabulary: Format = Format.BF16) -> Formats:
    """One format for the layers' matrices, one for the embedding and the output head.

    A router stays in bfloat16: it is small, and its errors send tokens to other experts.
    """
    return MappingProxyType(
        {
            MatrixRole.LINEAR: linear,
            MatrixRole.GATED: linear,
            MatrixRole.EMBEDDING: vocabulary,
            MatrixRole.HEAD: vocabulary,
            MatrixRole.ROUTER: Format.BF16,
        }
    )


# What `--quantization` makes of a model. Four bits cost too much quality in the head, whose rows are the tokens.
QUANTIZATIONS: Mapping[str, Formats] = MappingProxyType(
    {"int8": formats(Format.INT8, Format.INT8), "int4": formats(Format.INT4, Format.INT8)}
)
UNQUANTIZED = formats(Format.BF16)
