"""The bytes of loaded models and adapters, as digests. Imports no torch: a process without it tells what it has loaded.

python -c "import sys; sys.modules['torch'] = None; ..." FOLDER ...
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.config.configs import EngineConfig
from tokenmill.model.adapters.merging import merged
from tokenmill.model.adapters.packing import AdapterForm, AdapterReader
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.quantization.packed import QUANTIZATIONS, UNQUANTIZED
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import ModelPlan, choose_formats, plan_model
from tokenmill.model.weights.sharing import load_weights
from tokenmill.platform.memory import Arena

FORMATS = {"bf16": UNQUANTIZED, **QUANTIZATIONS}


def plan_of(folder: Path, format: str, load_format: str = "auto") -> ModelPlan:
    """The plan of a folder in native kernels; a quantized one stays as it is stored."""
    stored = choose_formats(folder, None)
    formats = FORMATS[format] if stored == UNQUANTIZED else stored
    kernels, _ = select_kernels("native", "cpu", "bfloat16", 1, formats)
    return plan_model(folder, read_architecture(folder), kernels, load_format)


def digests_of_models(folders: list[Path], load_format: str = "auto") -> dict[str, str]:
    """The digest of each model in each format: of all weights, vectors and rotary tables."""
    return {
        f"{number} {format}": _of_plan(plan_of(folder, format, load_format))
        for number, folder in enumerate(folders)
        for format in FORMATS
    }


def digest_of_adapter(base: Path, adapter: Path) -> dict[str, str]:
    """The digests of an adapter as a native pass reads it, and of the model that it is merged into."""
    plan = plan_of(base, "bf16")
    reader = AdapterReader(plan.load(), plan.kernels, 64, AdapterForm.ONE_CALL)
    native = reader.read(str(adapter)).adapter.native
    assert native is not None, "it is read for one call"
    return {"adapter": _of(native._arrays), "merged": _of_plan(merged(plan, adapter, 64))}


def source_of_packed(folder: Path, cache: Path) -> tuple[str, str]:
    """Return the source of weights that a cache may have, and the digest of the form of a row of the embedding."""
    config = EngineConfig(model=str(folder), weight_cache_dir=str(cache))
    loaded = load_weights(plan_of(folder, "int8"), folder, config, lambda done, total: None)
    return loaded.source.partition(" in ")[0], _of([_rows(loaded.decoder)])


def _rows(decoder: Decoder) -> Any:
    assert decoder.embedding is not None, "it is whole"
    return decoder.embedding.lookup(np.arange(decoder.tokens.count))


def _of_plan(plan: ModelPlan) -> str:
    memory = np.zeros(sum(map(Arena.room, plan.sizes)), np.uint8)
    decoder = plan.load(arena=Arena(memory))
    tables = [table for rotary in decoder.rotary.values() for table in (rotary.cos, rotary.sin)]
    mapped = [] if decoder.per_layer is None or decoder.per_layer.table is None else [decoder.per_layer.table.values]
    return _of([memory, *tables, *mapped])


def _of(arrays: list[Any]) -> str:
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    models, base, adapter, cache = msgspec.json.decode(sys.argv[1])
    found = {
        "models": digests_of_models([Path(model) for model in models]),
        "dummy": digests_of_models([Path(base)], "dummy"),
        "adapter": digest_of_adapter(Path(base), Path(adapter)),
        "packed": source_of_packed(Path(base), Path(cache)),
    }

    sys.stdout.write(msgspec.json.encode(found).decode())
