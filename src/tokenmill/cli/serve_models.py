"""`tokenmill serve --models-dir DIR`, `--models FILE.toml`: find the models, and serve them all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.model_presets import Presets, read_key_models, read_presets
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.model_description import FoundModel
from tokenmill.ipc.standard_streams import lossy

# Of what is free at the start.
_SHARE = 3 / 4


def run(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve the models that the flags name until Ctrl-C; return the exit code.

    Raises:
        InvalidConfig: flags that do not go together, a file or a folder that cannot be read.
    """
    check_flags(engine, server)
    path = server.api_key_models
    keys = {} if path is None else read_key_models(Path(path).expanduser())
    server = dataclasses.replace(server, api_key=(*server.api_key, *keys))
    find(server)  # mistakes come before anything heavy is imported
    from tokenmill.platform.select import select_platform
    from tokenmill.serving.models.catalogue import Catalogue, read_catalogue
    from tokenmill.serving.models.process import serve

    platform = select_platform(engine.device)
    engine = dataclasses.replace(engine, device=platform.device)

    def read(budget: int) -> Catalogue:
        found, presets = find(server)
        return read_catalogue(found, presets, (engine, server), budget)

    budget = server.models_memory or int(platform.available_bytes() * _SHARE)
    with lossy("stdout", "stderr"):
        return serve(server, read, budget, platform.available_bytes, keys, max(1, engine.max_num_seqs // 2))


def find(server: ServerConfig) -> tuple[list[FoundModel], Presets]:
    """Return the models that the flags name, and their presets.

    Raises:
        InvalidConfig: a file or a folder cannot be read, or a preset is of no model.
    """
    presets = read_presets(Path(server.models).expanduser()) if server.models else Presets()
    return all_models(server.models_dir, presets), presets


def all_models(folder: str | None, presets: Presets) -> list[FoundModel]:
    """Return the models of a folder, and those that presets name besides.

    Raises:
        InvalidConfig: a preset is of no model.
    """
    from tokenmill.model.weights.model_folder import find_models, found_model

    found = {} if folder is None else {model.name: model for model in find_models(Path(folder).expanduser())}
    for name, preset in presets.named.items():
        if preset.model is not None:
            found[name] = found_model(name, preset.model)
        elif name not in found:
            from tokenmill.core.names import did_you_mean

            raise InvalidConfig(
                f"--models: [{name}] is no model of --models-dir{did_you_mean(name, found)}; "
                "say with `model` where it lies"
            )
    return list(found.values())


def check_flags(engine: EngineConfig, server: ServerConfig) -> None:
    """Refuse flags that are of one model, or of one engine.

    Raises:
        InvalidConfig: naming the flag.
    """
    refused = {
        "a MODEL": bool(engine.model),
        "--served-model-name": bool(server.served_model_name),
        "--step-log": bool(engine.step_log),
        "--nnodes": engine.nnodes > 1,
        "--api-server-count": server.api_server_count > 1,
        "--lora-modules": bool(engine.lora_modules),
    }
    for flag, is_given in refused.items():
        if is_given:
            raise InvalidConfig(f"{flag} does not go with --models-dir and --models, which are of several models")
