"""A GGUF file as a model folder: its metadata written out as the small files that every other part reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.config.gguf_names import choose_tower
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.whole_file import write_whole
from tokenmill.model.vocabulary.mapped_file import keep_vocabulary
from tokenmill.model.weights.gguf.config import config_of, takes_tower
from tokenmill.model.weights.gguf.file import GgufFile, open_gguf, part_paths
from tokenmill.model.weights.gguf.tokenizer import build_tokenizer, piece_files
from tokenmill.model.weights.gguf.tower import processor_config, tower_config
from tokenmill.model.weights.gguf.vocabulary import Vocabulary, read_vocabulary

LINK_NAME, TOWER_LINK_NAME = "model.gguf", "mmproj.gguf"
# Name of a mapped vocabulary until the files beside it, after which it is called, are there.
MAPPED = "mapped"
PROCESSOR = "preprocessor_config.json"
# Changes what is written of the same file: folders of other versions are not found any more.
VERSION = 7
# Files beside a GGUF file that are taken before its metadata.
SIBLINGS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", PROCESSOR)
TEMPLATE = "tokenizer.chat_template"
# The sampling that a model's authors recommend: names of generation_config.json by llama.cpp's.
SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def unpack(path: Path, cache: Path, tower: Path | None = None) -> Path:
    """Return the folder for a file, made in `cache` if it is not there: small files, and links to all its parts.

    `SIBLINGS` beside the file are taken before what its metadata say, and belong to the folder's name; so does the file
    with its vision tower, if the model takes one.

    Args:
        tower: the file of its vision tower; None: the one beside it, if there is one.

    Raises:
        InvalidCheckpoint: the file cannot be read or is not supported.
    """
    # Not resolved: in the hub's cache the file behind a link has a digest for a name.
    path = path.absolute()
    parts = part_paths(path)
    siblings = {name: path.with_name(name) for name in SIBLINGS if path.with_name(name).is_file()}
    tower = tower or _tower_beside(path)
    folder = cache / f"{path.stem}-{_identity([*parts, *siblings.values(), *([tower] if tower else [])])}"
    if (folder / "config.json").exists():
        return folder
    file = open_gguf(path)
    tower = tower if takes_tower(file.metadata) else None
    config = config_of(file, tower is not None)
    own = {"generation_config.json": _json(_sampling(file.metadata))}
    files = own if "tokenizer.json" in siblings else tokenizer_files(file)
    mapped = files.pop(MAPPED, None)
    if tower is not None:
        tower_file = open_gguf(tower)
        config = tower_config(tower_file, file, config)
        files[PROCESSOR] = _json(processor_config(tower_file))
    files |= {name: sibling.read_bytes() for name, sibling in siblings.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(folder / name, content)
    if mapped is not None:
        keep_vocabulary(folder, mapped)
    for part in parts if len(parts) > 1 else ():
        _link(folder / part.name, part)
    _link(folder / LINK_NAME, parts[0] if len(parts) == 1 else Path(parts[0].name))
    if tower is not None:
        _link(folder / TOWER_LINK_NAME, tower.absolute())
    # Last: a folder that has it is complete.
    write_whole(folder / "config.json", _json(config))
    return folder


def _tower_beside(path: Path) -> Path | None:
    name = choose_tower([one.name for one in path.parent.iterdir()], path.name)
    return None if name is None else path.with_name(name)


def _identity(files: list[Path]) -> str:
    """Return a digest of files by place, size and time."""
    digest = hashlib.sha256(f"{VERSION}".encode())
    for file in files:
        status = file.stat()
        digest.update(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _link(place: Path, target: Path) -> None:
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, made of the metadata; perhaps with its mapped vocabulary.

    Raises:
        InvalidCheckpoint: the vocabulary is not supported, or its lists do not fit each other.
    """
    metadata = file.metadata
    try:
        vocabulary = read_vocabulary(metadata)
        stored = metadata.get("tokenizer.huggingface.json")
        pieces = None if isinstance(stored, str) else piece_files(vocabulary, metadata)
        if pieces is not None:
            text, mapped = pieces
        else:
            mapped = None
            text = (stored if isinstance(stored, str) else build_tokenizer(vocabulary, metadata).to_str()).encode()
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{file.path}: {error}") from error
    generation: dict[str, Any] = {"eos_token_id": sorted(vocabulary.ends)} if vocabulary.ends else {}
    suppressed = metadata.get("tokenizer.ggml.suppress_tokens")
    if suppressed:
        generation["suppress_tokens"] = suppressed
    return {
        **({} if mapped is None else {MAPPED: mapped}),
        "tokenizer.json": text,
        "tokenizer_config.json": _json(_tokenizer_config(vocabulary, metadata) | _chat_template(metadata)),
        "generation_config.json": _json(generation | _sampling(metadata)),
    }


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metadata[key] for name, key in SAMPLING.items() if key in metadata}


def _tokenizer_config(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"unknown": "unk", "seperator": "sep", "padding": "pad"}
    tokens = {f"{names.get(name, name)}_token": number for name, number in vocabulary.ids.items()}
    tokens |= {f"fim_{name}_token": number for name, number in vocabulary.infilling.items()}
    return {
        "add_bos_token": vocabulary.adds_bos,
        **({"add_eos_token": True} if metadata.get("tokenizer.ggml.add_eos_token") else {}),
        **{name: vocabulary.tokens[number] for name, number in tokens.items()},
    }


def _chat_template(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template, or the list of them that Hugging Face's files have where there are several."""
    default = metadata.get(TEMPLATE)
    names = metadata.get("tokenizer.chat_templates") or ()
    named = {name: metadata[f"{TEMPLATE}.{name}"] for name in names if f"{TEMPLATE}.{name}" in metadata}
    if default is None and not named:
        return {}
    if not named:
        return {"chat_template": default}
    named = {"default": default, **named} if default is not None else named
    return {"chat_template": [{"name": name, "template": template} for name, template in named.items()]}


def _json(content: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content))
