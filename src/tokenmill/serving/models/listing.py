"""Show models in the forms of the APIs that list them: OpenAI's, llama.cpp's and Ollama's.

Everything here is read from what is known; nothing is loaded for it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from tokenmill.core.model_description import ModelDescription
from tokenmill.core.sizes import size_text
from tokenmill.serving.models.catalogue import Catalogue, Entry
from tokenmill.serving.models.records import NEVER
from tokenmill.serving.models.service import ModelService, exit_text
from tokenmill.serving.models.states import SERVING, ModelState
from tokenmill.serving.server.ollama.models import NEVER_EXPIRES, parameter_count
from tokenmill.serving.server.ollama.names import tagged

# llama.cpp's words.
_STATUS = {
    ModelState.UNLOADED: "unloaded",
    ModelState.LOADING: "loading",
    ModelState.READY: "loaded",
    ModelState.DRAINING: "loaded",
    ModelState.FALLING_ASLEEP: "sleeping",
    ModelState.SLEEPING: "sleeping",
    ModelState.UNLOADING: "unloaded",
    ModelState.FAILED: "unloaded",
}
_MODALITIES = {"vision": "image", "audio": "audio"}


class Listing:
    """The models of a service, as the APIs show them."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._started = int(time.time())

    def state(self, entry: Entry) -> dict[str, Any]:
        """Return the state of a model with what belongs to it: progress, the problem, or when it expires."""
        record = self._service.record(entry.name)
        problem = entry.description.problem or record.problem
        state = ModelState.FAILED if entry.description.problem else record.state
        said: dict[str, Any] = {"state": state.value}
        if state is ModelState.LOADING:
            said["progress"] = self._progress(entry.name)
        if problem:
            said["problem"] = problem
            if record.exit_code is not None:
                said["exit_code"] = record.exit_code
                said["how"] = exit_text(record.exit_code)
        said["num_requests"], said["num_waiting"] = len(record.using), len(record.waiting)
        return said

    def card(self, entry: Entry) -> dict[str, Any]:
        """Return the entry of /v1/models: OpenAI's fields, and ours."""
        description = entry.description
        return {
            "id": entry.name,
            "object": "model",
            "created": int(entry.found.modified) or self._started,
            "owned_by": "tokenmill",
            "max_model_len": self._context(entry),
            "aliases": list(entry.preset.aliases),
            "adapters": list(entry.adapters),
            "capabilities": list(description.capabilities),
            "architecture": description.architecture,
            "num_parameters": description.num_parameters,
            "stored_as": description.stored.quantization,
            "size": entry.found.num_bytes,
            "memory": description.memory.total,
            "pinned": entry.preset.pinned,
            **self.state(entry),
        }

    def cards(self, catalogue: Catalogue) -> list[dict[str, Any]]:
        """Return the entries of all models, and of their adapters, whose parent is the model that they change."""
        found = []
        for entry in catalogue:
            card = self.card(entry)
            found.append(card)
            found += [card | {"id": name, "parent": entry.name, "adapters": []} for name in entry.adapters]
        return found

    def router_card(self, entry: Entry) -> dict[str, Any]:
        """Return the entry of llama.cpp's /models."""
        record, capabilities = self._service.record(entry.name), entry.description.capabilities
        status: dict[str, Any] = {"value": _STATUS[record.state], "args": []}
        if entry.description.problem or record.state is ModelState.FAILED:
            status |= {"failed": True, "exit_code": record.exit_code or 1}
        if record.state is ModelState.LOADING:
            status["progress"] = self._progress(entry.name)
        inputs = ["text", *(word for name, word in _MODALITIES.items() if name in capabilities)]
        return {
            "id": entry.name,
            "object": "model",
            "created": int(entry.found.modified) or self._started,
            "owned_by": "tokenmill",
            "path": entry.found.path.rpartition("/")[2],
            "architecture": {"input_modalities": inputs, "output_modalities": ["text"]},
            "status": status,
        }

    def tag(self, entry: Entry, name: str) -> dict[str, Any]:
        """Return the entry of Ollama's /api/tags for one of a model's names."""
        description = entry.description
        return {
            "name": tagged(name),
            "model": tagged(name),
            "modified_at": _time(entry.found.modified or self._started),
            "size": entry.found.num_bytes,
            "digest": entry.digest,
            "details": self._details(entry),
            "capabilities": list(description.capabilities),
        }

    def tags(self, catalogue: Catalogue) -> list[dict[str, Any]]:
        """Return the entries of all names of all models."""
        return [self.tag(entry, name) for entry in catalogue for name in (*entry.names, *entry.adapters)]

    def running(self, catalogue: Catalogue) -> list[dict[str, Any]]:
        """Return the entries of Ollama's /api/ps: the models that are loaded."""
        found = []
        for entry in catalogue:
            record = self._service.record(entry.name)
            if record.state in SERVING:
                left = record.expires_at - time.monotonic()
                until = NEVER_EXPIRES if record.expires_at == NEVER else _time(time.time() + left)
                memory = record.num_bytes
                on_gpu = 0 if entry.engine.device == "cpu" else memory
                loaded = {"expires_at": until, "size": memory, "size_vram": on_gpu}
                found.append(self.tag(entry, entry.name) | loaded | {"context_length": self._context(entry)})
        return found

    def shown(self, entry: Entry) -> dict[str, Any]:
        """Return what Ollama's /api/show says of a model."""
        description = entry.description
        family = _family(description)
        sampling = entry.preset.sampling
        return {
            "license": "",
            "modelfile": f"FROM {entry.name}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
            "template": description.template,
            "details": self._details(entry),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": description.num_parameters,
                f"{family}.context_length": self._context(entry),
                f"{family}.vocab_size": description.vocab_size,
            },
            "capabilities": list(description.capabilities),
            "modified_at": _time(entry.found.modified or self._started),
        }

    def _details(self, entry: Entry) -> dict[str, Any]:
        description = entry.description
        family = _family(description)
        return {
            "parent_model": "",
            "format": description.stored.format,
            "family": family,
            "families": [family],
            "parameter_size": parameter_count(description.num_parameters),
            "quantization_level": description.stored.quantization,
        }

    def _context(self, entry: Entry) -> int:
        """Return the tokens of the longest request: of a loaded model as it turned out."""
        loaded = self._service.loaded.get(entry.name)
        return entry.description.context if loaded is None else loaded.context

    def _progress(self, name: str) -> dict[str, Any]:
        loading = self._service.progress.get(name)
        if loading is None:
            return {"phase": "starting", "share": 0.0, "text": "starting"}
        share = loading.done / loading.total if loading.total else 0.0
        is_bytes = loading.total >= 1 << 20
        text = f"{size_text(loading.done)} of {size_text(loading.total)}" if is_bytes else ""
        return {"phase": loading.phase, "share": round(share, 4), "text": text or loading.phase}


def _family(description: ModelDescription) -> str:
    return description.stored.family or description.architecture.lower() or "unknown"


def _time(seconds: float) -> str:
    """Return a time as Ollama writes it; one that no calendar has is never."""
    try:
        moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return NEVER_EXPIRES
    return moment.isoformat().replace("+00:00", "Z")
