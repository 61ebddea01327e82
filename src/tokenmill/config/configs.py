"""Configuration: frozen dataclasses whose field metadata is the one source of flags, environment names and config keys.

Nothing below this module reads the environment, and nothing changes a config in place: `resolve()` returns a new one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tokenmill.config.checks import check_engine, check_server
from tokenmill.config.engine_settings import EngineSettings
from tokenmill.config.server_settings import ServerSettings
from tokenmill.core.errors import InvalidConfig

# What the names of types stand for, where that is not the same word.
_DTYPE_NAMES = {"auto": "bfloat16", "half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineSettings):
    """The settings of the engine process. A field left at None is decided by `resolve` or by the engine at start."""

    def resolve(self) -> EngineConfig:
        """Check the fields against each other and fill in those that do not depend on the model.

        Raises:
            InvalidConfig: naming the flags and what to change.
        """
        check_engine(self)
        is_gpu = self.device.startswith("cuda")
        utilization, overlap, budget = self.gpu_memory_utilization, self.async_scheduling, self.max_num_batched_tokens
        # What the device `auto` is, only the engine knows: it resolves once more.
        if utilization is None and self.device != "auto":
            utilization = 0.92 if is_gpu else 0.4
        if overlap is None and self.device != "auto":
            overlap = is_gpu
        if budget is None and self.device != "auto":
            budget = max(self.max_num_seqs, 8192 if is_gpu else 512 if self.enable_chunked_prefill else 2048)
        if utilization is not None and not 0.0 < utilization <= 1.0:
            raise InvalidConfig(f"--gpu-memory-utilization must be in (0, 1], got {utilization}")
        return dataclasses.replace(
            self,
            dtype=_DTYPE_NAMES.get(self.dtype, self.dtype),
            gpu_memory_utilization=utilization,
            async_scheduling=overlap,
            max_num_batched_tokens=budget,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ServerSettings):
    """The settings of the API process, besides the engine's config."""

    def resolve(self) -> ServerConfig:
        """Check the fields.

        Raises:
            InvalidConfig: naming the flag and what to change.
        """
        check_server(self)
        return self
