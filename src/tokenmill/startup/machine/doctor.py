"""`doctor`: report what this machine has, what an engine will use of it and why, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform as python_platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import TokenMillError
from tokenmill.core.sizes import size_text
from tokenmill.demo import demo_model_path
from tokenmill.model.kernels.native import available_levels
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import measure
from tokenmill.platform.memory import huge_pages
from tokenmill.platform.protocol import Platform
from tokenmill.platform.select import select_platform
from tokenmill.platform.torch_package import has_torch, may_have_gpu
from tokenmill.startup.machine.bandwidth import read_bandwidth
from tokenmill.startup.machine.device import choose_backend, choose_kernels, choose_threads
from tokenmill.startup.machine.torch_needs import check_torch

# Of memory: enough for the demo model and the processes of a server.
LEAST_FREE = 1 << 30
COMPILERS = ("c++", "g++", "clang++")
# A model that is worth all threads.
LARGE = 1 << 30


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        text: what was found.
        mend: what is wrong and how to fix it; empty: all is well.
    """

    name: str
    text: str
    mend: str = ""

    def __str__(self) -> str:
        line = f"{'!!' if self.mend else 'ok'} {self.name:<12} {self.text}"
        return f"{line}\n   {'mend':<12} {self.mend}" if self.mend else line


def examine(platform: Platform, root: Path = Path("/")) -> Iterator[Finding]:
    """Look at the machine, one finding after the other; measuring memory takes about a second of it.

    Args:
        root: the folder of /proc and /dev; tests give one of their own.
    """
    yield _processor(root)
    yield _instructions()
    yield _memory(platform)
    yield _gpu(platform, root)
    yield _torch()
    yield _compiler()
    yield _folder()
    yield _versions()
    yield from _used(platform)


def _processor(root: Path) -> Finding:
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, python_platform.processor() or "unknown")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("processor", f"{name}, {python_platform.machine()}, {usable} of {os.cpu_count()} cores usable")


def _instructions() -> Finding:
    levels = available_levels()
    if levels:
        return Finding("native", f"kernels for {', '.join(levels)}; the last is the best that this machine has")
    if python_platform.machine() not in ("x86_64", "AMD64"):
        return Finding("native", "none: they are for x86-64; torch computes instead, if it is there")
    if levels is not None:
        return Finding("native", "none that fits: this machine has no AVX2; torch computes instead, if it is there")
    mend = "install a C++ compiler, then TokenMill again (make serve, or pip install --force-reinstall): "
    return Finding("native", "none were built", f"{mend}without them a model is several times slower")


def _memory(platform: Platform) -> Finding:
    free = platform.available_bytes()
    if free < LEAST_FREE:
        wanted = size_text(LEAST_FREE)
        return Finding("memory", f"{size_text(free)} free", f"end other programs: less than {wanted} are free")
    speed, threads = read_bandwidth(platform) / 1e9, platform.num_threads()
    how = "" if platform.is_accelerator else f" by {threads} thread{'s' * (threads > 1)}; {huge_pages()}"
    return Finding("memory", f"{size_text(free)} free, read at {speed:,.3g} GB/s{how}")


def _gpu(platform: Platform, root: Path) -> Finding:
    if platform.is_accelerator:
        name = getattr(platform, "device_name", platform.name)
        major, minor = platform.capability()
        text = f"{name}, capability {major}.{minor}, {size_text(platform.available_bytes())} free"
        mend = "" if importlib.util.find_spec("triton") else "pip install triton: kernels for GPUs are compiled by it"
        return Finding("GPU", text, mend)
    if not may_have_gpu(root):
        return Finding("GPU", "none")
    if not has_torch():
        return Finding("GPU", "there is one, and torch, which uses it, is missing", "pip install 'tokenmill[gpu]'")
    from tokenmill.platform.cuda import cuda_version

    if not cuda_version():
        mend = f"install torch for CUDA: this one ({_version('torch')}) is built for CPUs"
        return Finding("GPU", "there is one, and this torch cannot use it", mend)
    return Finding(
        "GPU",
        "there is one, and torch finds none",
        "see that nvidia-smi works, and that CUDA_VISIBLE_DEVICES hides nothing",
    )


def _torch() -> Finding:
    """Tell whether torch is there; a CPU with native kernels is well without."""
    users = "GPUs, images, sound, --dtype float32 and float16, and reference kernels"
    version = _version("torch") if has_torch() else None
    return Finding("torch", f"{version or 'not installed'}; {users} need it (pip install 'tokenmill[torch]')")


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return Finding("compiler", found or "none; it is needed to build the native kernels from source only")


def _folder() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding("temporary", folder, "make it writable, or set TMPDIR: the processes of a server meet there")
    return Finding("temporary", f"{folder}, {size_text(free)} free")


def _versions() -> Finding:
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("tokenmill") or []]
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "TokenMill runs from its source, so nothing says which packages it needs")
    versions = {one.name: _version(one.name) for one in wanted}
    wanted = [one for one in wanted if _is_needed(one) or versions[one.name] is not None]
    wrong = [one for one in wanted if not one.specifier.contains(versions[one.name] or "0", prereleases=True)]
    text = f"Python {python_platform.python_version()}, {len(wanted)} packages checked"
    bad = ", ".join(f"{one.name} {versions[one.name] or 'is missing'}" for one in wrong)
    mend = " ".join(f"'{one.name}{one.specifier}'" for one in wrong)
    return Finding("packages", f"{text}: {bad}" if bad else text, f"pip install {mend}" if mend else "")


def _is_needed(package: Requirement) -> bool:
    """Return False for a package of an extra: its version counts only where it is installed."""
    return package.marker is None or package.marker.evaluate({"extra": ""})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _used(platform: Platform) -> Iterator[Finding]:
    """Yield the choices of an engine on this machine, for the demo model but with the threads of a large one."""
    config = EngineConfig(model=str(demo_model_path()), device=platform.device).resolve()
    try:
        threads, why_threads = choose_threads(config, platform, LARGE)
        check_torch(config, read_architecture(demo_model_path()), platform)
        kernels, why_kernels = choose_kernels(config, platform, demo_model_path(), threads)
        spec = measure(read_architecture(demo_model_path()), kernels)[0].attention_spec
        attention = choose_backend(config, platform, spec, kernels)
    except TokenMillError as error:
        yield Finding("engine", "cannot start", str(error))
        return
    yield Finding("-> device", platform.device)
    yield Finding("-> kernels", f"{kernels.name} ({why_kernels})")
    yield Finding("-> attention", f"{attention.name} ({attention.reason})")
    yield Finding("-> threads", f"{threads} ({why_threads})")


def doctor(say: Callable[[Finding], None]) -> bool:
    """Examine this machine and tell each finding as it is made; True if all is well."""
    platform, is_well = select_platform("auto"), True
    for finding in examine(platform):
        say(finding)
        is_well = is_well and not finding.mend
    return is_well
