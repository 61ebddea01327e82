"""Starts of engines that share packed weights, without the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmill.config.configs import EngineConfig
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.quantization.packed import UNQUANTIZED, PackedFormats
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import ModelPlan, plan_model
from tokenmill.model.weights.sharing import LoadedWeights, load_weights

PACKED, MAPPED, ALONE = "packed into the cache", "mapped from the cache", "packed in "


class Start:
    """One model and one cache folder, and engines' starts with them."""

    def __init__(self, folder: Path, formats: PackedFormats = UNQUANTIZED) -> None:
        self.model, self.cache, self.formats = folder / "model", folder / "cache", formats

    @property
    def file(self) -> Path:
        (file,) = self.cache.iterdir()
        return file

    def plan(self) -> ModelPlan:
        kernels, _ = select_kernels("native", "cpu", "bfloat16", 1, self.formats)
        return plan_model(self.model, read_architecture(self.model), kernels)

    def load(self, **options: Any) -> LoadedWeights:
        config = EngineConfig(model=str(self.model), **{"weight_cache_dir": str(self.cache), **options})
        return load_weights(self.plan(), self.model, config, lambda done, total: None)
