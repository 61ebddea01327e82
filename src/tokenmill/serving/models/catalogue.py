"""`Catalogue`: the models of one server: what each is called, where it lies, what it takes, how it is started."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.fields import adapter_modules
from tokenmill.config.model_presets import EVERY, Preset, Presets
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.model_description import FoundModel, ModelDescription
from tokenmill.core.names import did_you_mean
from tokenmill.ipc.python_child import run_python
from tokenmill.serving.models.errors import ModelForbidden
from tokenmill.serving.models.model_server import RESPONSES, SOCKET
from tokenmill.serving.models.records import NEVER, Rules
from tokenmill.serving.models.reports import Launch
from tokenmill.serving.server.http.errors import ModelNotFound, without_folders
from tokenmill.serving.server.ollama.names import LATEST, tagged

DESCRIBER_MODULE = "tokenmill.startup.sizing.describe_models"
_SHOWN = 12


class Entry(msgspec.Struct, frozen=True):
    """One model.

    Attributes:
        adapters: names of LoRA adapters that its server starts with.
        engine, server: configs of its server, without what `launch_of` adds.
    """

    found: FoundModel
    preset: Preset
    description: ModelDescription
    engine: EngineConfig
    server: ServerConfig
    adapters: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.found.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model itself."""
        return (self.found.name, *self.preset.aliases)

    @property
    def digest(self) -> str:
        """Hexadecimal digest that another path, size or time of its files changes."""
        identity = f"{self.found.path}|{self.found.num_bytes}|{self.found.modified}"
        return hashlib.sha256(identity.encode()).hexdigest()

    @property
    def keys(self) -> tuple[str, ...]:
        """API keys that its server takes; empty: it needs none."""
        return self.server.api_key

    def rules(self, ttl: float) -> Rules:
        """Return what holds for its memory; `ttl`: seconds where its preset says nothing; 0: never."""
        asked = ttl if self.preset.ttl is None else self.preset.ttl
        return Rules(self.description.memory.total, self.preset.pinned, asked or NEVER, self.preset.group)

    def launch_of(self, folder: Path, num_models: int) -> Launch:
        """Return how its server is started, with a private folder; `num_models` share the disk."""
        memory, engine = self.description.memory, self.engine
        engine = dataclasses.replace(
            engine,
            kv_share_bytes=memory.kv // self.server.data_parallel_size,
            state_memory=engine.state_memory or memory.states // self.server.data_parallel_size or None,
        )
        if engine.kv_disk is not None:
            size = engine.kv_disk_size and engine.kv_disk_size // num_models
            # Of the name, too: models of equal files may differ in their flags, and a folder is one server's.
            own = hashlib.sha256(self.name.encode()).hexdigest()[:16]
            engine = dataclasses.replace(engine, kv_disk=str(Path(engine.kv_disk) / own), kv_disk_size=size)
        names = (*self.names, *(tagged(name) for name in self.names if tagged(name) != name))
        server = dataclasses.replace(
            self.server,
            uds=str(folder / SOCKET),
            served_model_name=names,
            responses_dir=self.server.responses_dir or str(folder.parent / RESPONSES),
        )
        return Launch(engine, server)


class Catalogue:
    """All models, by name; a request may use the name, an alias, an adapter, or Ollama's `name:latest` of each."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Make the catalogue; the default model, if there is one, stands first.

        Raises:
            InvalidConfig: two models have the same name.
        """
        entries = sorted(entries, key=lambda entry: not entry.preset.default)
        self._entries = {entry.name: entry for entry in entries}
        self._names: dict[str, str] = {}
        for entry in entries:
            for name in (*entry.names, *entry.adapters):
                if self._names.setdefault(_key(name), entry.name) != entry.name:
                    raise InvalidConfig(f"{name} names two models: {self._names[_key(name)]} and {entry.name}")
        self._hidden = frozenset[str]()
        self.default = entries[0].name if entries and (entries[0].preset.default or len(entries) == 1) else None

    def only(self, names: Set[str] | None) -> Catalogue:
        """Return the catalogue as a key sees it that may use the models of these names; `*` and None: all."""
        if names is None or EVERY in names:
            return self
        seen = Catalogue([entry for entry in self if not names.isdisjoint(entry.names)])
        seen._hidden = frozenset(self._names) - frozenset(seen._names)
        return seen

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def find(self, name: str) -> Entry:
        """Return the model that a name stands for: its own, an alias, or one of its adapters.

        Raises:
            ModelNotFound: there is no such model; the message says what there is.
            ModelForbidden: there is, and it is another key's.
        """
        found = self._names.get(_key(name))
        if _key(name) in self._hidden:
            seen = ", ".join(list(self._entries)[:_SHOWN]) or "none of the models of this server"
            raise ModelForbidden(f"this API key may not use model {name[:200]}: it may use {seen}")
        if found is None:
            known = list(self._entries)
            more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            raise ModelNotFound(
                f"model '{name[:200]}' not found{did_you_mean(name[:200], known)}; this server has "
                f"{', '.join(known[:_SHOWN]) or 'no models'}{more}",
                "model",
            )
        return self._entries[found]


def read_catalogue(
    found: Sequence[FoundModel],
    presets: Presets,
    configs: tuple[EngineConfig, ServerConfig],
    budget: int,
    describe: Callable[[Sequence[tuple[EngineConfig, int]], int], list[ModelDescription]] | None = None,
) -> Catalogue:
    """Return the catalogue of models and presets; takes a process, which imports what reads their headers.

    Args:
        found: all models; those that only presets name among them.
        configs: what holds for all models.
        budget: bytes that they may take together.

    Raises:
        InvalidConfig: presets or flags of a model do not go together; two models share a name.
    """
    made = [(model, presets.of(model.name)) for model in found]
    engines = [dataclasses.replace(preset.apply(configs[0]), model=model.path).resolve() for model, preset in made]
    servers = [preset.apply(_server_of_model(configs[1], preset)).resolve() for _, preset in made]
    questions = [(engine, server.data_parallel_size) for engine, server in zip(engines, servers, strict=True)]
    descriptions = (describe or ask_describer)(questions, budget)
    return Catalogue(
        [
            Entry(model, preset, _shown(description), engine, server, tuple(adapter_modules(engine.lora_modules)))
            for (model, preset), engine, server, description in zip(made, engines, servers, descriptions, strict=True)
        ]
    )


def _shown(description: ModelDescription) -> ModelDescription:
    """Return a description without the folders of this machine."""
    return msgspec.structs.replace(description, problem=without_folders(description.problem))


def ask_describer(questions: Sequence[tuple[EngineConfig, int]], budget: int) -> list[ModelDescription]:
    """Return the descriptions of models with these configs and numbers of engines."""
    asked = [{"engine": engine, "num_engines": count, "budget": budget} for engine, count in questions]
    answer = run_python(["-m", DESCRIBER_MODULE], input=msgspec.json.encode(asked), capture_output=True)
    return msgspec.json.decode(answer.stdout, type=list[ModelDescription])


def _server_of_model(server: ServerConfig, preset: Preset) -> ServerConfig:
    """Return the config of a model's server: guards of browsers and TLS stand before it already, keys are passed on."""
    sampling: Mapping[str, object] = preset.sampling
    own = (msgspec.json.encode(sampling).decode(),) if sampling else ()
    return dataclasses.replace(
        server,
        models_dir=None,
        models=None,
        api_key_models=None,
        root_path="",
        allowed_origins=(),
        allowed_hosts=(),
        ssl_keyfile=None,
        ssl_certfile=None,
        batch_dir=None,
        is_behind=True,
        # A process less for each model.
        tokenizer_workers=0 if server.tokenizer_workers == 1 else server.tokenizer_workers,
        override_generation_config=(*server.override_generation_config, *own),
        # The server of all models has its own.
        keep_alive_timeout=max(server.keep_alive_timeout, 600.0),
    )


def _key(name: str) -> str:
    return name.removesuffix(LATEST)
