"""TokenMill: an LLM inference and serving engine that runs the same code on a laptop and on a big GPU.

Importing this package is instant: the public names are loaded when they are first used, so that neither
`import tokenmill` nor `tokenmill --help` pays for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.core.sampling_params import SamplingParams as SamplingParams
    from tokenmill.llm.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Load `LLM` and `SamplingParams` on first use (PEP 562)."""
    if name == "LLM":
        from tokenmill.llm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tokenmill.core.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
