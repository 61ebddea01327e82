"""TokenMill: an LLM inference and serving engine that runs the same code on a laptop and on a big GPU.

Importing this package is instant: the public names are loaded when they are first used, so that neither
`import tokenmill` nor `tokenmill --help` pays for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.core.version import VERSION

if TYPE_CHECKING:
    from tokenmill.core.sampling_params import SamplingParams as SamplingParams
    from tokenmill.core.structured_outputs import StructuredOutputs as StructuredOutputs
    from tokenmill.llm.adapters import LoRARequest as LoRARequest
    from tokenmill.llm.async_llm import AsyncLLM as AsyncLLM
    from tokenmill.llm.beam_search import BeamSearchParams as BeamSearchParams
    from tokenmill.llm.llm import LLM as LLM

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_MODULES = {
    "LLM": "tokenmill.llm.llm",
    "AsyncLLM": "tokenmill.llm.async_llm",
    "BeamSearchParams": "tokenmill.llm.beam_search",
    "LoRARequest": "tokenmill.llm.adapters",
    "SamplingParams": "tokenmill.core.sampling_params",
    "StructuredOutputs": "tokenmill.core.structured_outputs",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
