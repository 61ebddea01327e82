"""What an engine on a GPU is made of, where it differs from one on a CPU."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator

import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidConfig
from tokenmill.kernels.protocol import Kernels
from tokenmill.kernels.torch_kernels import TorchKernels
from tokenmill.models.architecture import Architecture
from tokenmill.platform.protocol import Platform

logger = logging.getLogger(__name__)

MIB = 1 << 20
# Generations of NVIDIA's GPUs: the first with bfloat16, and the first whose products take a scale per row.
BFLOAT16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (9, 0)


def check(config: EngineConfig, platform: Platform, dtype: torch.dtype) -> None:
    """Refuse what this device cannot do, and modes that do not go together.

    Raises:
        InvalidConfig: which flag, and what to change.
    """
    obstacles = _gpu_obstacles(config, platform, dtype) if platform.is_accelerator else _cpu_obstacles(config)
    for obstacle in obstacles:
        raise InvalidConfig(obstacle)


def _cpu_obstacles(config: EngineConfig) -> Iterator[str]:
    for name in ("enforce_eager", "batch_invariant"):
        if getattr(config, name):
            yield f"--{name.replace('_', '-')} is for GPUs; a CPU needs no such mode"
    if config.quantization == "fp8":
        yield "--quantization fp8 needs a GPU; a CPU has int8 and int4"


def _gpu_obstacles(config: EngineConfig, platform: Platform, dtype: torch.dtype) -> Iterator[str]:
    if importlib.util.find_spec("triton") is None:
        yield f"--device {platform.device} needs triton, which CUDA builds of torch bring along"
    if config.kernels == "native":
        yield f"--kernels native does not run on {platform.device}; use auto"
    if config.quantization in ("int8", "int4"):
        yield f"--quantization {config.quantization} is for CPUs; a GPU has fp8"
    if config.kv_cache_dtype != "auto":
        yield f"--kv-cache-dtype {config.kv_cache_dtype} is for CPUs"
    if config.batch_invariant and (config.kernels == "torch" or config.quantization == "fp8"):
        yield "--batch-invariant goes neither with --kernels torch nor with --quantization fp8"
    if config.quantization == "fp8" and dtype != torch.bfloat16:
        yield "--quantization fp8 needs --dtype bfloat16"
    # What stands in for a GPU in a test has no generation.
    generation = platform.capability()
    for wanted, least in (
        (dtype == torch.bfloat16, BFLOAT16_CAPABILITY),
        (config.quantization == "fp8", FP8_CAPABILITY),
    ):
        if wanted and generation != (0, 0) and generation < least:
            flag = "--dtype bfloat16" if least == BFLOAT16_CAPABILITY else "--quantization fp8"
            yield f"{flag} needs a GPU of capability {_dotted(least)}, this one has {_dotted(generation)}"


def gpu_kernels(config: EngineConfig, platform: Platform, dtype: torch.dtype) -> tuple[Kernels, str]:
    """The kernels of a GPU, and why; see `check` for what is refused."""
    if config.kernels == "torch":
        return TorchKernels(dtype, platform.device), "asked for"
    from tokenmill.kernels.triton.kernels import TritonKernels

    is_fp8 = config.quantization == "fp8"
    kernels = TritonKernels(dtype, platform.device, is_invariant=config.batch_invariant, fp8=is_fp8)
    return kernels, "sums in one order" if config.batch_invariant else "fp8 products" if is_fp8 else "for GPUs"


def workspace_bytes(config: EngineConfig, architecture: Architecture, dtype: torch.dtype) -> int:
    """Memory that a step takes besides weights and KV: activations of the widest layer, and logits, twice over."""
    mlp = architecture.intermediate_size
    if architecture.moe is not None:
        mlp = max(mlp, architecture.moe.intermediate_size * architecture.moe.experts_per_token)
    per_token = 4 * architecture.hidden_size + 2 * architecture.q_size + 2 * architecture.kv_size + 3 * mlp
    logits = config.max_num_seqs * architecture.vocab_size * (4 + dtype.itemsize)
    return 2 * (config.step_budget * per_token * dtype.itemsize + logits)


def capture_graphs(
    capture: Callable[[Callable[[int, int], None]], int], platform: Platform, report: Callable[[int, int], None]
) -> str:
    """Capture graphs and say how many there are and what memory they took."""
    before = platform.available_bytes()
    count = capture(report)
    taken = max(0, before - platform.available_bytes()) / MIB
    logger.info("captured %d CUDA graphs, which took %.0f MiB", count, taken)
    return f"{count} graphs, {taken:,.0f} MiB"


def _dotted(generation: tuple[int, int]) -> str:
    return ".".join(map(str, generation))
