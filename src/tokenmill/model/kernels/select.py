"""Select the kernels that run a model, with the reason."""

from __future__ import annotations

from tokenmill.core.errors import InvalidConfig
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.quantization.packed import FLOATS, UNQUANTIZED, PackedFormats


def select_kernels(
    name: str, device: str, dtype: str, num_threads: int, formats: PackedFormats = UNQUANTIZED
) -> tuple[Kernels, str]:
    """Make the kernels.

    Args:
        name: `torch`, `native` or `auto`.
        dtype: its name, e.g. `bfloat16`.
        formats: formats of the matrices, for kernels that can pack them; `FLOATS` of a model whose native pass runs in
            float32. Torch kernels dequantize checkpoints.

    Returns:
        The kernels, and a clause that gives the reason for the choice.

    Raises:
        InvalidConfig: the native kernels are asked for, but cannot run here.
    """
    if name == "torch":
        return _in_torch(device, dtype), "asked for"
    obstacle = _obstacle(device, dtype, formats)
    native = load_kernels(num_threads) if obstacle is None else None
    if native is not None:
        # Imported here: these modules need the extension.
        from tokenmill.model.kernels.native_kernels import NativeKernels

        return NativeKernels(native, formats), native.isa
    obstacle = obstacle or "the native kernels were not built for this machine (no C++ compiler?)"
    if name == "native":
        raise InvalidConfig(f"--kernels native: {obstacle}")
    return _in_torch(device, dtype), obstacle


def _in_torch(device: str, dtype: str) -> Kernels:
    # Imported here: native kernels run where there is no torch.
    from tokenmill.model.kernels.torch_kernels import TorchKernels

    return TorchKernels(dtype, device)


def _obstacle(device: str, dtype: str, formats: PackedFormats) -> str | None:
    """Return the reason that rules out the native kernels; None if they can run, provided they were built."""
    if device.partition(":")[0] != "cpu":
        return "the native kernels are for CPUs"
    if dtype != ("float32" if formats == FLOATS else "bfloat16"):
        return f"the native kernels are for bfloat16, not {dtype}"
    return None
