"""Find the parts that take part in an event: a base class names the hooks, and a part overrides those it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

Part = TypeVar("Part")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def overriding(parts: Iterable[Part], hook: Callable[..., object]) -> tuple[Part, ...]:
    """Return those parts that override this hook, in their order: calling them all calls nothing in vain.

    Args:
        hook: as the base class has it, such as `EngineExtension.arrived`.
    """
    return tuple(part for part in parts if getattr(type(part), hook.__name__) is not hook)


def hooks(
    parts: Iterable[object], hook: Callable[Concatenate[Any, Arguments], Result]
) -> tuple[Callable[Arguments, Result], ...]:
    """Return this hook of the parts that are `overriding` it, ready to be called."""
    return tuple(getattr(part, hook.__name__) for part in overriding(parts, hook))
