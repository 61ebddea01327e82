"""Describe models that are not loaded: where each lies, what it takes, and what it can do."""

from __future__ import annotations

import msgspec


class FoundModel(msgspec.Struct, frozen=True):
    """A model of a folder.

    Attributes:
        name: its path below the folder, without suffixes; of the hub's cache, its id there.
        path: a folder, or the (first) GGUF file.
        num_bytes: of its weights on the disk.
        modified: seconds since the epoch.
    """

    name: str
    path: str
    num_bytes: int = 0
    modified: float = 0.0


class ModelMemory(msgspec.Struct, frozen=True):
    """Bytes that a loaded model takes.

    Attributes:
        weights: of the decoder, in the form in which they are kept.
        tower: of a vision tower or an encoder of sound, and of what it makes.
        kv: of the KV cache. states: of recurrent states.
        spare: taken for a moment while the weights are loaded, before the KV cache is.
        processes: of its processes themselves.
    """

    weights: int
    tower: int = 0
    kv: int = 0
    states: int = 0
    spare: int = 0
    processes: int = 0

    @property
    def total(self) -> int:
        """The most that is taken at a time."""
        return self.processes + self.weights + self.tower + max(self.spare, self.kv + self.states)


class StoredFormat(msgspec.Struct, frozen=True):
    """The form of a model's files, in the words of Ollama and LM Studio.

    Attributes:
        format: gguf or safetensors.
        family: `model_type` of config.json, or a GGUF file's architecture.
        quantization: how its weights are kept when they are loaded: Q4_K_M, gptq, int8, bfloat16 ...
    """

    format: str = "safetensors"
    family: str = ""
    quantization: str = ""


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model before it is loaded.

    Attributes:
        stored: the form of its files. context: tokens of the longest request; the KV cache may turn out to be smaller.
        capabilities: in Ollama's words: completion, tools, thinking, vision, audio.
        template: the chat template; "": none.
        problem: one sentence why it cannot be loaded; "": nothing is known against it.
    """

    memory: ModelMemory = ModelMemory(0)
    context: int = 0
    architecture: str = ""
    num_parameters: int = 0
    vocab_size: int = 0
    stored: StoredFormat = StoredFormat()
    capabilities: tuple[str, ...] = ("completion",)
    template: str = ""
    problem: str = ""
