"""The bundled demo model, its draft, and a head for SmolLM2: where they lie. Knows nothing of how they are loaded."""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_model_path", "draft_model_path", "smollm2_head_path"]


def demo_model_path() -> Path:
    """Folder of the demo model, a Hugging Face Qwen3 checkpoint of about 5.8 million parameters."""
    return Path(__file__).parent / "model"


def draft_model_path() -> Path:
    """Folder of its draft of about 0.9 million parameters, for speculative decoding; a wheel leaves it out."""
    return Path(__file__).parent / "draft"


def smollm2_head_path() -> Path:
    """Folder of an EAGLE-3 head of 5.5 million parameters for SmolLM2-135M-Instruct; a wheel leaves it out."""
    return Path(__file__).parent / "smollm2_head"
