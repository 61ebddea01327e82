"""`tokenmill bench KIND`: run the benchmarks of the laboratory."""

from __future__ import annotations

from tokenmill.lab.bench import KINDS, run

__all__ = ["KINDS", "run"]
