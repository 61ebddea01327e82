"""Which parts take part in which event: a base class names the hooks, and a part overrides those it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def hooks(
    parts: Iterable[object], hook: Callable[Concatenate[Any, Arguments], Result]
) -> tuple[Callable[Arguments, Result], ...]:
    """Return this hook of those parts that override it, in their order: whoever calls them all calls nothing in vain.

    Args:
        hook: as the base class has it, such as `EngineExtension.arrived`.
    """
    name = hook.__name__
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not hook)
