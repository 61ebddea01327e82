"""A GPU that holds no numbers: torch's fake tensors on a made-up device, to see each copy and kernel that is issued.

It needs a process of its own, since it gives torch a backend and triton another launch: see `fake_gpu_cases.py`.
Reading a number on the host (`.item()`, `nonzero`) and mixing devices raise by themselves; copies between host and
device are listed with the line of the source that makes them, and so are kernels that get a tensor of the host. Every
compilation of a kernel is noted by all that it depends on.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

KIND = "fakegpu"
DEVICE = f"{KIND}:0"
_SOURCES = "/src/tokenmill/"

backend_registration._setup_privateuseone_for_python_backend(KIND)
MODE = FakeTensorMode(allow_non_fake_inputs=True)


@dataclass
class Seen:
    """Record what has been issued, by phase: `start`, `capture` or `step`.

    Attributes:
        copies: (phase, direction, whether the host waits, line) -> how often.
        host_arguments: kernels that were given a tensor of the host.
        compiled: what each kernel was compiled for, by phase.
        launches: kernels by phase and name.
        operations: those of torch that launch something, by phase and name.
        captures: launches and operations of each capture, in the order of captures.
    """

    phase: str = "start"
    copies: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    host_arguments: Counter[str] = field(default_factory=Counter)
    compiled: dict[str, set[Any]] = field(default_factory=dict)
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    captures: list[dict[str, int]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget everything."""
        self.phase = "start"
        for store in (self.copies, self.host_arguments, self.compiled, self.launches, self.operations, self.captures):
            store.clear()

    def told(self) -> dict[str, Any]:
        """Return the work of captures and steps, and the kernels first compiled while requests ran, with reasons."""
        before = self.compiled.get("start", set()) | self.compiled.get("capture", set())
        late = sorted(map(str, self.compiled.get("step", set()) - before))
        copies = [[*what, count] for what, count in self.copies.items() if what[0] != "start"]
        return {"copies": copies, "host_arguments": dict(self.host_arguments), "late": late}

    def copy(self, source: torch.device, target: torch.device, is_blocking: bool) -> None:
        """Note a copy, if it is one between host and device."""
        if (source.type == KIND) != (target.type == KIND):
            direction = "to the device" if target.type == KIND else "to the host"
            self.copies[self.phase, direction, "blocking" if is_blocking else "not blocking", _line()] += 1

    @contextmanager
    def during(self, phase: str) -> Any:
        """Count what is issued to a phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


SEEN = Seen()


def _line() -> str:
    for frame in reversed(traceback.extract_stack()[:-2]):
        # Who asks the library for a copy is told, not the library.
        if _SOURCES in frame.filename and not frame.filename.endswith("platform/device_arrays.py"):
            return f"{frame.filename.partition(_SOURCES)[2]}: {(frame.line or '').strip()}"
    return "elsewhere"


_ISSUE_NOTHING = ("prim.", "aten.empty", "aten.new_empty", "aten.flatten", "aten.scalar_tensor")


class Watch(TorchDispatchMode):
    """Lists copies, and runs operations of the host alone for what they are."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(function)
        if name.startswith("aten._local_scalar_dense") and args[0].device.type == KIND and SEEN.phase == "start":
            return 1  # an engine that starts may wait
        if name.startswith(("aten._to_copy", "aten.to.")) and isinstance(args[0], torch.Tensor):
            target, changed = _target(name, args, kwargs)
            if target is not None and (target.type == KIND) != (args[0].device.type == KIND):
                SEEN.copy(args[0].device, target, not changed.get("non_blocking"))
                if target.type != KIND:
                    with _disable_current_modes():  # the host reads these numbers
                        return torch.zeros(tuple(args[0].shape), dtype=changed.get("dtype") or args[0].dtype)
                return torch.empty(args[0].shape, dtype=changed.get("dtype") or args[0].dtype, device=target)
        tensors = [one for one in _flat([*args, *kwargs.values()]) if isinstance(one, torch.Tensor)]
        on_host = tensors and not any(isinstance(one, FakeTensor) for one in tensors)
        if on_host and KIND not in str(kwargs.get("device", "")):
            with _disable_current_modes():
                return function(*args, **kwargs)
        if not (function.is_view or name.startswith(_ISSUE_NOTHING)):
            SEEN.operations[SEEN.phase, name.split(".")[1]] += 1
        if name.startswith("aten.copy_"):
            SEEN.copy(args[1].device, args[0].device, not (kwargs.get("non_blocking") or args[2:3] == (True,)))
        return function(*args, **kwargs)


def _target(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, dict[str, Any]]:
    """The device that a conversion names, and its dtype and whether it blocks."""
    target, changed = kwargs.get("device"), dict(kwargs)
    if name.startswith("aten.to.device"):
        target = args[1] if len(args) > 1 else target
        changed |= dict(zip(("dtype", "non_blocking"), args[2:4], strict=False))
    elif name.startswith("aten.to.other"):
        target = args[1].device
    return (None if target is None else torch.device(target)), changed


def _flat(values: Sequence[Any]) -> list[Any]:
    return [one for value in values for one in (_flat(value) if isinstance(value, list | tuple) else [value])]


def _launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
    """In the place of `JITFunction.run`: note what it would be compiled for."""
    given = dict(zip((param.name for param in kernel.params), args, strict=False)) | kwargs
    name = kernel.fn.__name__
    key: list[Any] = [name, tuple(sorted((option, value) for option, value in given.items() if option in _OPTIONS))]
    for param in kernel.params:
        value = given.get(param.name, param.default if param.has_default else None)
        if isinstance(value, torch.Tensor) and value.device.type != KIND:
            SEEN.host_arguments[f"{name}: {param.name}"] += 1
        key.append(_specialized(param, value))
    SEEN.launches[SEEN.phase, name] += 1
    SEEN.compiled.setdefault(SEEN.phase, set()).add(tuple(key))


_OPTIONS = ("num_warps", "num_stages", "num_ctas", "launch_pdl")


def _specialized(param: Any, value: Any) -> Any:
    """Return the part of an argument that a kernel's code depends on."""
    if param.is_constexpr or value is None or isinstance(value, bool | float | str):
        return value if param.is_constexpr or not isinstance(value, float) else "float"
    if isinstance(value, torch.Tensor):
        is_aligned = value.storage_offset() * value.element_size() % 16 == 0
        return str(value.dtype), is_aligned or param.do_not_specialize or param.do_not_specialize_on_alignment
    if isinstance(value, int):
        wide = "int32" if -(2**31) <= value < 2**31 else "int64"
        if param.do_not_specialize:
            return wide
        return wide, value == 1, value % 16 == 0 or param.do_not_specialize_on_alignment
    return str(value)


triton.runtime.jit.JITFunction.run = _launch


WATCH = Watch()
