"""Define `LoRARequest`, vLLM's way to name an adapter for a call of `LLM`, and keep the adapters named so far."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenmill.core.adapters import AdapterRef
from tokenmill.core.errors import InvalidRequest
from tokenmill.model.adapters.config import CONFIG_NAME
from tokenmill.model.adapters.reading import WEIGHTS_NAME

_State = tuple[tuple[int, int, int], ...]


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter to run prompts with.

    Attributes:
        lora_int_id: vLLM's number of it; ignored here, where the contents of the files count.
        lora_path: folder with adapter_config.json and adapter_model.safetensors.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


class NamedAdapters:
    """Adapters by the contents of their files, read again when these have changed.

    Args:
        look_at: reads the adapter of a folder under a name.
    """

    def __init__(self, look_at: Callable[[str, str], AdapterRef]) -> None:
        self._look_at = look_at
        self._known: dict[LoRARequest, tuple[_State, AdapterRef]] = {}

    def find(self, request: LoRARequest | None) -> AdapterRef | None:
        """Return the adapter that a request names; None for no adapter.

        Raises:
            InvalidRequest: it is not a LoRARequest.
            InvalidCheckpoint: its files cannot be served; says why.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise InvalidRequest(f"not a LoRARequest, but {type(request).__name__}", "lora_request")
        state = _state_of(Path(request.lora_path))
        known = self._known.get(request)
        if known is None or not state or known[0] != state:
            known = self._known[request] = state, self._look_at(request.lora_name, request.lora_path)
        return known[1]


def _state_of(folder: Path) -> _State:
    """Return the state of an adapter's files, to see when they change; empty if they are missing."""
    try:
        states = [os.stat(folder / name) for name in (CONFIG_NAME, WEIGHTS_NAME)]
    except OSError:
        return ()
    return tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)
