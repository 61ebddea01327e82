"""Check what a device can do, and choose the kernels and threads that an engine uses there, each with the reason."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from tokenmill.config.configs import EngineConfig
from tokenmill.config.engine_settings import STORED_FORMATS
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.backend import AttentionConfig
from tokenmill.model.attention.context import ContextRanks
from tokenmill.model.attention.context_step import ContextDevices
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.attention.registry import AttentionChoice, choose_attention
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.models.native_decoder import float_pass_obstacle
from tokenmill.model.quantization.packed import ENCODER_INT8, FLOATS, PackedFormat
from tokenmill.model.weights.loader import check_stored, choose_formats
from tokenmill.model.weights.mixture import can_mix, typical_formats
from tokenmill.platform.memory import huge_pages
from tokenmill.platform.protocol import Platform

logger = logging.getLogger(__name__)

# Generations of NVIDIA's GPUs: the first with bfloat16, and the first whose products take a scale per row.
BFLOAT16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (9, 0)
# The matrix products of a small model are too short to be worth sharing between threads. Measured for 11 MiB of weights
# only (one thread won, by far on busy cores); where two threads begin to win has not been measured.
ONE_THREAD_BYTES = 64 << 20
# More only wait for each other, and thousands crash the libraries that start them.
THREADS_PER_CORE = 16


def check(config: EngineConfig, platform: Platform) -> None:
    """Refuse features that this device does not have, and modes that do not go together.

    Raises:
        InvalidConfig: which flag, and what to change.
    """
    obstacles = _gpu_obstacles(config, platform) if platform.is_accelerator else _cpu_obstacles(config)
    for obstacle in obstacles:
        raise InvalidConfig(obstacle)
    if config.enforce_eager and not platform.is_accelerator:
        logger.warning("--enforce-eager changes nothing on a CPU")


def _cpu_obstacles(config: EngineConfig) -> Iterator[str]:
    if config.batch_invariant:
        yield "--batch-invariant is for GPUs; a CPU needs no such mode"
    if config.quantization == "fp8":
        yield "--quantization fp8 needs a GPU; a CPU has int8 and int4"
    if config.all_reduce == "one-shot":
        yield "--all-reduce one-shot is for GPUs; ranks on CPUs read each other's memory in any case"


def _gpu_obstacles(config: EngineConfig, platform: Platform) -> Iterator[str]:
    if importlib.util.find_spec("triton") is None:
        yield f"--device {platform.device} needs triton, which CUDA builds of torch bring along"
    if config.nnodes > 1:
        yield "--nnodes is for CPUs: the GPUs of an engine are those of one machine"
    if config.context_parallel_size > 1:
        yield from _context_obstacles(config)
    if config.enable_expert_parallel:
        yield "--enable-expert-parallel is for CPUs; GPUs have a part of each expert"
    if config.num_ranks > 1 and config.enable_lora:
        yield "--enable-lora needs one GPU, or CPUs: ranks on GPUs have no adapters yet"
    if config.tensor_parallel_size > 1 and config.batch_invariant and config.all_reduce == "nccl":
        yield (
            "--batch-invariant with --tensor-parallel-size needs --all-reduce one-shot: the order in which NCCL adds "
            "up depends on the size of a step"
        )
    if config.kernels == "native":
        yield f"--kernels native does not run on {platform.device}; use auto"
    if config.quantization in ("int8", "int4"):
        yield f"--quantization {config.quantization} is for CPUs; a GPU has fp8"
    if config.batch_invariant and (config.kernels == "torch" or config.quantization == "fp8"):
        yield "--batch-invariant cannot be combined with --kernels torch or --quantization fp8"
    if config.quantization == "fp8":
        yield from _fp8_obstacles(config)
    # What stands in for a GPU in a test has no generation.
    generation = platform.capability()
    for wanted, least in (
        (config.dtype == "bfloat16", BFLOAT16_CAPABILITY),
        (config.quantization == "fp8", FP8_CAPABILITY),
    ):
        if wanted and generation != (0, 0) and generation < least:
            flag = "--dtype bfloat16" if least == BFLOAT16_CAPABILITY else "--quantization fp8"
            yield f"{flag} needs a GPU of capability {_dotted(least)}, this one has {_dotted(generation)}"


def _fp8_obstacles(config: EngineConfig) -> Iterator[str]:
    if config.kernels == "torch":
        yield "--quantization fp8 needs the kernels for GPUs: leave out --kernels torch, which keeps floats"
    if config.dtype != "bfloat16":
        yield "--quantization fp8 needs --dtype bfloat16"


def _context_obstacles(config: EngineConfig) -> Iterator[str]:
    """Yield why GPUs cannot share a context."""
    from tokenmill.model.kernels.triton.splits import SPLIT_KEYS

    if config.page_size != SPLIT_KEYS:
        yield (
            f"--context-parallel-size on GPUs needs --page-size {SPLIT_KEYS}: a page is a split of a decode's context, "
            "and whole on one GPU"
        )
    if config.batch_invariant:
        yield "--context-parallel-size splits contexts, which --batch-invariant does not allow: leave one of them out"
    if config.speculative_config is not None:
        yield "--context-parallel-size: GPUs that share a context verify no drafts yet; leave out --speculative-config"


def choose_kernels(
    config: EngineConfig,
    platform: Platform,
    folder: Path,
    num_threads: int,
    architecture: Architecture | None = None,
) -> tuple[Kernels, str]:
    """Choose kernels for the platform, in the formats that the checkpoint or `--quantization` asks for; says why.

    Args:
        architecture: of the model; None: one that does not run in float32 natively.

    Raises:
        InvalidConfig: these weights cannot be multiplied here in the form that is asked for.
    """
    if is_stored := config.quantization in STORED_FORMATS:
        check_stored(folder, config.quantization)
    if platform.is_accelerator:
        return gpu_kernels(config, platform, choose_formats(folder, None).experts)
    wanted = None if is_stored or config.quantization == "none" else config.quantization
    formats = choose_formats(folder, wanted)
    if architecture is not None and runs_floats(config, architecture):
        formats = FLOATS
    elif architecture is not None and wanted == "int8" and not architecture.needs_kv:
        formats = ENCODER_INT8
    if config.lora_merge is not None:
        formats = formats.for_floats()
    kernels, reason = select_kernels(config.kernels, "cpu", config.dtype, num_threads, formats)
    if wanted is not None and kernels.name != "native":
        raise InvalidConfig(f"--quantization {wanted} needs the native kernels: {reason}")
    if config.dtype == "float32" and config.kernels == "auto" and architecture is not None:
        obstacle = float_pass_obstacle(architecture)
        reason += f"; {obstacle}" if obstacle else ""
    return kernels, reason


def runs_floats(config: EngineConfig, architecture: Architecture) -> bool:
    """Return True if a model runs on the CPU in float32 natively, where the kernels were built."""
    is_free = config.kernels != "torch" and config.attention_backend in ("auto", "native")
    return config.dtype == "float32" and is_free and float_pass_obstacle(architecture) is None


def name_rounding(kernels: Kernels, device: str, uses_torch: bool = False) -> str:
    """Name what rounds a model's numbers: under one name the same inputs give the same bits, in every release.

    Native kernels round alike on every level of instructions but AMX; torch as its version and the processor have it.

    Args:
        uses_torch: parts of the model run in torch whatever its kernels are, as encoders do.
    """
    native = getattr(kernels, "native", None)
    names = [kernels.name] if native is None else [kernels.name, "tiles" if native.isa == "amx" else "vectors"]
    if native is None or uses_torch:
        import torch

        names += [device.partition(":")[0], torch.__version__, torch.backends.cpu.get_cpu_capability()]
    return "/".join(names)


def within_budget(config: EngineConfig, kernels: Kernels, architecture: Architecture) -> Kernels:
    """Return kernels of int4 with formats that its budget has room for; which matrices need bits is measured later."""
    if config.quantization != "int4" or not isinstance(kernels, NativeKernels) or not can_mix(architecture):
        return kernels
    return kernels.with_formats(typical_formats(architecture, kernels, config.quantization_bits))


def choose_backend(
    config: EngineConfig,
    platform: Platform,
    spec: AttentionSpec,
    kernels: Kernels,
    ranks: ContextRanks | None = None,
    devices: ContextDevices | None = None,
) -> AttentionChoice:
    """Choose the attention backend; refuse one that cannot run here before any weights are read.

    Args:
        ranks, devices: see `AttentionConfig`.

    Raises:
        InvalidConfig: the backend cannot run here; see `choose_attention`.
    """
    kv_dtype = None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    # A native pass in float32 leaves its scratch pages alone; they are those of bfloat16.
    dtype = "bfloat16" if kernels.name == "native" else config.dtype
    wanted = AttentionConfig(
        spec,
        config.page_size,
        dtype,
        platform,
        kv_dtype,
        native=getattr(kernels, "native", None),
        is_invariant=config.batch_invariant,
        shares_splits=config.shared_splits,
        is_page_first=config.kv_layout == "page-first",
        ranks=ranks,
        devices=devices,
    )
    return choose_attention(config.attention_backend, wanted)


def gpu_kernels(config: EngineConfig, platform: Platform, experts: PackedFormat | None = None) -> tuple[Kernels, str]:
    """Return the kernels of a GPU, and why; `check` refuses the rest. `experts`: their format; None: floats."""
    # Imported here: without a GPU nothing needs torch.
    if config.kernels == "torch":
        from tokenmill.model.kernels.torch_kernels import TorchKernels

        return TorchKernels(config.dtype, platform.device), "asked for"
    from tokenmill.model.kernels.triton.kernels import TritonKernels
    from tokenmill.model.kernels.triton.launch import allow_dependent

    allow_dependent(config.pdl)
    is_fp8 = config.quantization == "fp8"
    forms = {"is_invariant": config.batch_invariant, "fp8": is_fp8, "mxfp4": experts is PackedFormat.MXFP4}
    kernels = TritonKernels(config.dtype, platform.device, **forms)
    return kernels, "sums in one order" if config.batch_invariant else "fp8 products" if is_fp8 else "for GPUs"


def choose_threads(config: EngineConfig, platform: Platform, weight_bytes: int) -> tuple[int, str]:
    """Choose the number of threads; returns it with the reason that the start-up screen shows.

    They are not bound to cores: another job on a bound thread's core would delay that thread, and every step with it.

    Raises:
        InvalidConfig: unreasonably many are asked for.
    """
    most = THREADS_PER_CORE * (os.cpu_count() or 1)
    if config.num_threads is not None and config.num_threads > most:
        raise InvalidConfig(
            f"--num-threads {config.num_threads} is too many for this machine, whose cores can take turns with {most} "
            "at most; without the flag it is as many as there are cores"
        )
    if config.num_threads is not None:
        wanted, reason = config.num_threads, "--num-threads"
    elif weight_bytes < ONE_THREAD_BYTES and not platform.is_accelerator:
        wanted, reason = 1, "more would only wait for each other in so small a model"
    else:
        index, count = config.replica
        wanted, reason = max(1, platform.num_threads() // count), platform.threads_reason()
        if count > 1:
            what = "engine" if config.num_ranks == 1 else "rank"
            near = f", on nodes of its own: {what} {index}" if keep_to_nodes(index, count) else ""
            reason = f"a share of {reason}, for {count} {what}s{near}"
    threads = platform.set_num_threads(wanted)
    return threads, reason if platform.is_accelerator else f"{reason}; not bound to cores; {huge_pages()}"


def _dotted(generation: tuple[int, int]) -> str:
    return ".".join(map(str, generation))


def numa_nodes(root: Path = Path("/")) -> list[set[int]]:
    """Return the cores of each NUMA node that this process may use, without empty nodes; at least one node."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    lists = [folder / "cpulist" for folder in sorted(folders, key=lambda folder: int(folder.name[4:]))]
    nodes = [_cores(path.read_text()) & allowed for path in lists if path.exists()]
    return [node for node in nodes if node] or [allowed]


def nodes_of(index: int, count: int, nodes: list[set[int]]) -> set[int]:
    """Return the cores of the nodes that one of `count` engines keeps to: whole nodes, shared by as many engines each.

    If that does not divide evenly, and on a machine of one node, return all cores: they are shared in number only.
    """
    if len(nodes) % count and count % len(nodes):
        return set().union(*nodes)
    first = index * len(nodes) // count
    return set().union(*nodes[first : first + max(1, len(nodes) // count)])


def keep_to_nodes(index: int, count: int) -> bool:
    """Let the threads that this process starts from now on run on its own nodes only; False if these are all nodes."""
    nodes = numa_nodes()
    own = nodes_of(index, count, nodes)
    if len(own) == sum(map(len, nodes)):
        return False
    os.sched_setaffinity(0, own)
    return True


def _cores(text: str) -> set[int]:
    """Parse a list of cores as the kernel writes it, `0-3,8-11`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
