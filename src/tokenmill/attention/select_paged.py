"""Which attention runs on a GPU, and why."""

from __future__ import annotations

import torch

from tokenmill.attention.flash import FlashAttender, find_flash, flash_obstacle
from tokenmill.attention.flashinfer import FlashInferAttender, find_flashinfer
from tokenmill.attention.paged import Attender, PagedAttention
from tokenmill.attention.paged_memory import PagedMemory
from tokenmill.attention.protocol import AttentionSpec
from tokenmill.attention.triton import TritonDecodes, TritonPrompts
from tokenmill.errors import InvalidConfig
from tokenmill.platform.protocol import Platform

PAGED_BACKENDS = ("triton", "flash", "flashinfer")


def select_paged(
    name: str,
    platform: Platform,
    spec: AttentionSpec,
    pages: tuple[int, int],
    dtype: torch.dtype,
    is_invariant: bool = False,
) -> tuple[PagedAttention, str]:
    """Make the attention backend of a GPU with its KV memory.

    Args:
        name: `auto`, one of `PAGED_BACKENDS`, or two of them as `flash,triton`: for prompts, for decodes.
        pages: pages of the pool, the reserved page 0 among them, and tokens in a page.
        is_invariant: a token's result depends neither on its batch nor on the chunk that it came in.

    Returns:
        The backend, and a clause that says why it was taken.

    Raises:
        InvalidConfig: no such backend, or it cannot serve here.
    """
    names, reason = _names(name, platform, spec, pages[1], dtype, is_invariant)
    memory = PagedMemory(spec, *pages, dtype, platform.device)
    if is_invariant:
        return PagedAttention(spec, memory, TritonPrompts(spec), None), reason
    attenders = [_attender(own, platform, spec, pages[1], dtype, of) for of, own in enumerate(names)]
    return PagedAttention(spec, memory, attenders[0], attenders[1]), reason


def _names(
    name: str, platform: Platform, spec: AttentionSpec, page_size: int, dtype: torch.dtype, is_invariant: bool
) -> tuple[tuple[str, str], str]:
    """The backend of prompts and that of decodes, and why."""
    if is_invariant:
        if name not in ("auto", "triton"):
            raise InvalidConfig(f"--batch-invariant runs on attention backend triton, not {name}")
        return ("triton", "triton"), "sums in one order, for --batch-invariant"
    if name == "auto":
        obstacle = flash_obstacle(spec, page_size, dtype, platform.device)
        if obstacle is None:
            return ("flash", "triton"), "flash for prompts, its own split decodes"
        return ("triton", "triton"), obstacle
    names = tuple(name.split(","))
    if len(names) > 2 or not set(names) <= set(PAGED_BACKENDS):
        raise InvalidConfig(
            f"--attention-backend {name} is unknown on {platform.name}; choose auto, one of "
            f"{', '.join(PAGED_BACKENDS)}, or two as flash,triton: for prompts and for decodes"
        )
    for part in names:
        obstacle = None
        if part == "flash":
            obstacle = flash_obstacle(spec, page_size, dtype, platform.device)
        elif part == "flashinfer" and find_flashinfer() is None:
            obstacle = "flashinfer is not installed (pip install tokenmill[flashinfer])"
        if obstacle is not None:
            raise InvalidConfig(f"--attention-backend {part}: {obstacle}")
    return (names[0], names[-1]), "asked for"


def _attender(
    name: str, platform: Platform, spec: AttentionSpec, page_size: int, dtype: torch.dtype, decodes: int
) -> Attender:
    if name == "flash":
        attention = find_flash()
        assert attention is not None, "checked before"
        return FlashAttender(spec, attention)
    if name == "flashinfer":
        return FlashInferAttender(spec, page_size, dtype, platform.device, find_flashinfer())
    return TritonDecodes(spec, platform.num_units()) if decodes else TritonPrompts(spec)
