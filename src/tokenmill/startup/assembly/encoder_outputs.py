"""Encoder outputs beyond the engine: kept in a store that engines share, or made by encoder servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tokenmill.config.configs import EngineConfig
from tokenmill.config.vision import EncoderStore
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.extension import EngineExtension
from tokenmill.engine.scheduler.resources.encoder_cache import EncoderCache
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.weights.fingerprint import fingerprint
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.media import Media
from tokenmill.startup.machine.device import name_rounding

if TYPE_CHECKING:
    from tokenmill.engine.transfer.encoder_gate import EncoderGate
    from tokenmill.engine.transfer.encoder_outputs import StoredOutputs
    from tokenmill.engine.transfer.output_files import OutputStore

# For an encoder server to answer; then the engine encodes.
ASK_SECONDS = 30.0


class EncoderOutputs(Capability):
    """Gives the encoder a store, and requests a gate where they wait for outputs from encoder servers."""

    def __init__(self, config: EngineConfig, outputs: StoredOutputs) -> None:
        self._config = config
        self._outputs = outputs
        self._gate: EncoderGate | None = None

    @classmethod
    def check(cls, config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
        """Refuse the flags for a model of text, and addresses that are none."""
        if config.encoder_outputs() is None or architecture.takes_images or architecture.takes_sound:
            if config.encoder_urls:
                from tokenmill.engine.transfer.remote.encoder_client import checked_url

                for url in config.encoder_urls:
                    checked_url(url)
            return
        names = ("encoder_store", "encoder_urls", "ec_transfer_config")
        flag = next(name for name in names if getattr(config, name)).replace("_", "-")
        raise InvalidConfig(f"--{flag}: {architecture.name} takes neither images nor sound; leave it out")

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Open the store of an engine that has an encoder, if the config asks for one.

        Raises:
            InvalidConfig: its folder cannot be used.
        """
        config, model = assembly.config, assembly.model
        settings = config.encoder_outputs()
        media = next((one for one in assembly.capabilities if isinstance(one, Media)), None)
        if settings is None or media is None:
            return None
        # Brings torch, as encoders do.
        from tokenmill.engine.transfer.encoder_outputs import StoredOutputs, encoder_dtype

        whose = encoder_name(config, model.folder, model.kernels)
        store, dtype = open_store(settings), encoder_dtype(config.dtype)
        outputs = StoredOutputs(store, whose, dtype, settings.loads, settings.saves)
        media.encoder.source = outputs
        return cls(config, outputs)

    def engine_extensions(self, scheduler: EngineScheduler) -> Sequence[EngineExtension]:
        """Make the gate of this scheduler's requests; return what tells the scheduler of outputs."""
        from tokenmill.engine.transfer.encoder_gate import EncoderEvents, EncoderGate
        from tokenmill.engine.transfer.remote.encoder_client import EncoderClient

        cache, config, client = scheduler.resource(EncoderCache), self._config, None
        assert cache is not None, "an engine with an encoder has a cache for its outputs"
        if config.encoder_urls:
            client = EncoderClient(config.encoder_urls, config.encoder_api_key, self._outputs.put, ASK_SECONDS)
        self._gate = EncoderGate(self._outputs, client, cache.has_output, ASK_SECONDS)
        return (EncoderEvents(self._gate),)

    def gates(self) -> Sequence[EncoderGate]:
        """Return the gate."""
        assert self._gate is not None, "extensions are made before gates"
        return (self._gate,)


def encoder_name(config: EngineConfig, folder: Path, kernels: Kernels) -> str:
    """Name an encoder by all that its outputs depend on, so that equal names mean equal bits."""
    rounding = name_rounding(kernels, config.device, uses_torch=True)
    return f"{fingerprint(folder, 'encoder', config.dtype)}/{rounding}"


def open_store(settings: EncoderStore) -> OutputStore:
    """Return the store that settings describe.

    Raises:
        InvalidConfig: its folder cannot be used.
    """
    from tokenmill.engine.transfer.output_files import OutputFolder, OutputMemory

    if settings.folder is None:
        return OutputMemory(settings.num_bytes)
    folder = Path(settings.folder).expanduser()
    try:
        return OutputFolder(folder, settings.num_bytes)
    except OSError as error:
        raise InvalidConfig(f"encoder outputs cannot be kept in {folder}: {error.strerror or error}") from error
