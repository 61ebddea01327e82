"""The bundled demo model and its draft: where they lie. Knows nothing of how they are loaded or served."""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_model_path", "draft_model_path"]


def demo_model_path() -> Path:
    """Folder of the demo model, a Hugging Face Qwen3 checkpoint of about 5.8 million parameters."""
    return Path(__file__).parent / "model"


def draft_model_path() -> Path:
    """Folder of its draft of about 0.9 million parameters, for speculative decoding; a wheel leaves it out."""
    return Path(__file__).parent / "draft"
