"""List what runs on torch where there is no GPU, and refuse it by name where torch is not installed.

Everything else runs in NumPy and the native kernels. `platform/select.py` refuses a GPU, all of which needs torch; the
registry of attention says why `auto` found no backend.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.kernels.native import available_levels
from tokenmill.platform.protocol import Platform
from tokenmill.platform.torch_package import has_torch, missing_torch
from tokenmill.startup.machine.device import runs_floats


class TorchNeed(msgspec.Struct, frozen=True):
    """Something that needs torch on a CPU.

    Attributes:
        wish: returns it as a user would name it, where a config or a model asks for it, else None. The architecture is
            None while the model is not found yet.
        extra: of this package, which brings what it needs.
        instead: what does without; "": nothing.
    """

    wish: Callable[[EngineConfig, Architecture | None], str | None]
    extra: str = "torch"
    instead: str = ""


def _kernels(config: EngineConfig, architecture: Architecture | None) -> str | None:
    return "--kernels torch" if config.kernels == "torch" else None


def _dtype(config: EngineConfig, architecture: Architecture | None) -> str | None:
    # Of what runs in float32 without torch the architecture says more.
    is_native = config.dtype == "float32" and (architecture is None or runs_floats(config, architecture))
    is_refused = config.dtype in ("float16", "float32") and not is_native
    return f"--dtype {config.dtype} on a CPU" if is_refused else None


def _attention(config: EngineConfig, architecture: Architecture | None) -> str | None:
    is_plain = config.attention_backend in ("cpu", "reference")
    return f"--attention-backend {config.attention_backend}" if is_plain else None


def _machine(config: EngineConfig, architecture: Architecture | None) -> str | None:
    levels = available_levels()
    if levels is None:
        return "a machine without the native kernels, which were not built,"
    return None if levels else "a CPU without the instructions of the native kernels (AVX2)"


def _images(config: EngineConfig, architecture: Architecture | None) -> str | None:
    if architecture is None or not architecture.takes_images:
        return None
    return f"the vision tower of {architecture.name}"


def _sound(config: EngineConfig, architecture: Architecture | None) -> str | None:
    if architecture is None or not architecture.takes_sound:
        return None
    return f"the encoder of sound of {architecture.name}"


NEEDS: dict[str, TorchNeed] = {
    "kernels": TorchNeed(_kernels, instead="--kernels auto does without"),
    "dtype": TorchNeed(_dtype, instead="--dtype bfloat16 does without"),
    "attention": TorchNeed(_attention, instead="--attention-backend auto does without"),
    "machine": TorchNeed(_machine, instead="`tokenmill doctor` says what this machine has"),
    "images": TorchNeed(_images, "vision"),
    "sound": TorchNeed(_sound, "audio"),
}


def check_torch(config: EngineConfig, architecture: Architecture | None, platform: Platform) -> None:
    """Refuse what needs torch where torch is not installed.

    Args:
        config: resolved. architecture: None: the model is not found yet.

    Raises:
        InvalidConfig: what needs it, the command that installs it, and what does without.
    """
    if platform.is_accelerator or has_torch():
        return
    for need in NEEDS.values():
        wish = need.wish(config, architecture)
        if wish is not None:
            raise missing_torch(wish, need.extra, need.instead)
