"""Adapters as peft writes them, on small random checkpoints; peft itself is the oracle of what they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_oracle

if TYPE_CHECKING:
    import peft

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(base: Path, folder: Path, seed: int, **config: Any) -> peft.PeftModel:
    """Write an adapter with random values that matter; returns the oracle that has it."""
    import peft

    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, **config}
    model = peft.get_peft_model(load_oracle(base), peft.LoraConfig(**fields))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


def change_config(folder: Path, **fields: Any) -> None:
    """Overwrite fields of an adapter's config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Overwrite tensors of an adapter."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
