"""Keep the adapters that requests may name as their model: those of the start and those that operators load later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenmill.core.adapters import AdapterRef, check_adapter_name
from tokenmill.core.errors import Conflict, InvalidRequest, NotFound
from tokenmill.serving.replicas.engines import Engines


class AdapterRegistry:
    """A registry of adapter names and of what each name stands for now.

    A request takes what its name stands for when it comes; loading other files under a name, or unloading it, changes
    nothing for requests that are open.

    Args:
        adapters: the adapters loaded at the start.
        folder: where adapters are loaded from while the server runs; None: no loading while it runs.
    """

    def __init__(self, adapters: list[AdapterRef] | None = None, folder: str | None = None) -> None:
        self._adapters = {adapter.name: adapter for adapter in adapters or ()}
        self._folder = None if folder is None else Path(folder).expanduser()

    def __iter__(self) -> Iterator[AdapterRef]:
        return iter(list(self._adapters.values()))

    def find(self, name: str | None) -> AdapterRef | None:
        """Return the adapter that a name stands for; None: no adapter."""
        return None if name is None else self._adapters.get(name)

    async def load(self, name: str, path: str, engines: Engines, may_replace: bool) -> AdapterRef:
        """Load the adapter of a folder into all engines, then let a name stand for it.

        Raises:
            Conflict: the name is taken, or adapters are not loaded while the server runs.
            InvalidRequest: the folder lies elsewhere, or its contents cannot be served; says why.
            EngineDead: an engine gave no answer.
        """
        check_adapter_name(name)
        folder = self._checked_folder(path)
        self._check_free(name, may_replace)
        seen = await engines.look_at_adapter(name, str(folder))
        for answer in seen:
            if answer.adapter is None:
                raise InvalidRequest(answer.error, "lora_path")
        adapters = {answer.adapter for answer in seen if answer.adapter is not None}
        if len(adapters) != 1:
            raise Conflict("the adapter's files have changed while they were read")
        self._check_free(name, may_replace)
        (self._adapters[name],) = adapters
        return self._adapters[name]

    def unload(self, name: str) -> None:
        """Forget what a name stands for; open requests go on.

        Raises:
            Conflict: adapters are not unloaded while the server runs.
            NotFound: the name stands for no adapter.
        """
        self._folder_of_loads()
        if name not in self._adapters:
            raise NotFound(f"no adapter is called {name!r}", "lora_name")
        del self._adapters[name]

    def _check_free(self, name: str, may_replace: bool) -> None:
        if name in self._adapters and not may_replace:
            raise Conflict(f"the adapter {name} is there already; load_inplace replaces it")

    def _folder_of_loads(self) -> Path:
        if self._folder is None:
            raise Conflict("adapters are loaded and unloaded by a server started with --allow-runtime-lora only")
        return self._folder

    def _checked_folder(self, path: str) -> Path:
        """Return the folder that a path means, links resolved; a relative path starts at the adapters' folder."""
        root = self._folder_of_loads().resolve()
        try:
            folder = (root / path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise InvalidRequest("lora_path must be a path", "lora_path") from None
        if root not in folder.parents:
            raise InvalidRequest("lora_path must lie in the folder of --lora-dir", "lora_path")
        return folder
