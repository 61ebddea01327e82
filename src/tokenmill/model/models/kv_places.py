"""The places of each layer's KV. Layers with heads of one shape form a group with one memory and are numbered there;
those whose pages go when they lie behind a window, or that see whole images, form groups of their own.

A layer may read the KV of an earlier one instead of having any. Where tokens attend to those after them, a request is
whole in a step, and no keys outlast their layer: all layers of a group share the memory of one. Knows no torch and no
backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tokenmill.model.architecture.architecture import SelfAttentionSpec


class KVPlace(msgspec.Struct, frozen=True):
    """The place of a layer's KV; fields as in `AttentionLayer`. `layer`: its number among all layers."""

    layer: int
    group: int
    index: int
    reads_only: bool = False


Kind = tuple[int, int, int, bool, bool]
"""Heads, KV heads, head size; whether its pages are of the window group, and an image's tokens see each other."""


def kv_groups(attentions: Sequence[SelfAttentionSpec | None]) -> dict[Kind, int]:
    """Return the kind of each group, in the order of its first layer -> its number of layers that have KV."""
    counts: dict[Kind, int] = {}
    for spec in attentions:
        if spec is not None and spec.kv_from is None:
            counts[_kind(spec)] = counts.get(_kind(spec), 0) + 1 if spec.ahead == 0 else 1
    return counts


def kv_places(attentions: Sequence[SelfAttentionSpec | None]) -> Iterator[KVPlace | None]:
    """Return the place of each layer; None: it has no attention."""
    numbers = {kind: number for number, kind in enumerate(kv_groups(attentions))}
    found: list[KVPlace | None] = []
    counts = [0] * len(numbers)
    for layer, spec in enumerate(attentions):
        place = None
        if spec is not None and spec.kv_from is not None:
            source = found[spec.kv_from]
            assert source is not None, "a layer reads the KV of one that has it"
            place = msgspec.structs.replace(source, layer=layer, reads_only=True)
        elif spec is not None:
            group = numbers[_kind(spec)]
            place = KVPlace(layer, group, counts[group])
            counts[group] += spec.ahead == 0
        found.append(place)
    return iter(found)


def _kind(spec: SelfAttentionSpec) -> Kind:
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.in_window_group, spec.spans_see_ahead
