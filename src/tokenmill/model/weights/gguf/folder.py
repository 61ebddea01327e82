"""A GGUF file as a model folder: its metadata written out as the small files that every other part reads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.whole_file import write_whole
from tokenmill.model.weights.gguf.config import config_of
from tokenmill.model.weights.gguf.file import GgufFile, open_gguf
from tokenmill.model.weights.gguf.tokenizer import tokenizer_of

LINK_NAME = "model.gguf"


def unpack(path: Path, cache: Path) -> Path:
    """Return the folder for a file, made in `cache` if it is not there: config.json, tokenizer and a link to the file.

    A tokenizer.json beside the file is taken before the one in its metadata.

    Raises:
        InvalidCheckpoint: the file cannot be read or is not supported.
    """
    path = path.resolve()
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    folder = cache / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if (folder / "config.json").exists():
        return folder
    file = open_gguf(path)
    config = config_of(file)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LINK_NAME).unlink(missing_ok=True)
    (folder / LINK_NAME).symlink_to(path)
    _write_tokenizer(folder, file)
    # Last: a folder that has it is complete.
    _write_json(folder / "config.json", config)
    return folder


def _write_tokenizer(folder: Path, file: GgufFile) -> None:
    beside = file.path.parent
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    if (beside / "tokenizer.json").exists():
        for name in names:
            if (beside / name).exists():
                write_whole(folder / name, (beside / name).read_bytes())
        return
    tokenizer = tokenizer_of(file.metadata)
    if tokenizer is None:
        return
    write_whole(folder / "tokenizer.json", tokenizer.to_str().encode())
    tokens = file.metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", False))}
    for name in ("eos", "bos"):
        number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            config[f"{name}_token"] = tokens[number]
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.metadata["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, msgspec.json.format(msgspec.json.encode(content)))
