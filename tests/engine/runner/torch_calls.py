"""Note which operations of torch a step calls, and from which of our modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill.engine.runner.model_runner import ModelRunner

PACKAGE = "tokenmill."
# What torch does by itself around others: no step asks for it.
UNASKED = ("detach", "detach_", "lift_fresh", "resolve_conj", "resolve_neg")


class TorchCalls(TorchDispatchMode):
    """Collects, while it is entered, `module operation` of everything that torch computes or allocates.

    What moves no numbers (`from_numpy`, `data_ptr`, shapes) is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in UNASKED:
            self.found.add(f"{_caller()} {name}")
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(PACKAGE):
        frame = frame.f_back
    return "elsewhere" if frame is None else frame.f_globals["__name__"].removeprefix(PACKAGE)


@contextmanager
def torch_calls_of_steps(patch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Note what steps of a `ModelRunner` call, from their start to their result."""
    calls, start = TorchCalls(), ModelRunner.start

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any) -> Any:
            with calls:
                return function(*args)

        return run

    with patch.context() as own:
        own.setattr(ModelRunner, "start", lambda *args: noted(noted(start)(*args)))
        yield calls.found
