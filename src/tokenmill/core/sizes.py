"""Numbers of bytes as text."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """Format a number of bytes for people."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(0, int(num_bytes).bit_length() - 1) // 10, len(units) - 1)
    return f"{num_bytes / 1024**power:,.1f} {units[power]}"
