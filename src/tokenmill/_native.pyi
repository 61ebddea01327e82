"""The extension module that native/ builds: its names and types. Every Address is a Tensor.data_ptr()."""

from typing import TypeAlias

Address: TypeAlias = int

class Kernels:
    """The kernels of one instruction set, with the number of threads that they may use.

    Raises:
        ValueError: the machine or the build does not have the level.
    """

    def __init__(self, isa: str, threads: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def pack_bf16(
        self, weights: Address, rows: int, depth: int, start: int, source: Address, count: int, stride: int
    ) -> None: ...
    def linear_bf16(
        self,
        weights: Address,
        rows: int,
        depth: int,
        x: Address,
        count: int,
        stride: int,
        out: Address,
        bias: Address,
    ) -> None: ...

def available_isas() -> list[str]:
    """Levels that are built and that this machine runs, lowest first."""

def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP libraries in this process; more than one means more than one pool of threads."""
