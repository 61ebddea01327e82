"""Read the small JSON files beside a checkpoint's weights.

Knows the names and fields of Hugging Face folders; does not know tokenizers, weights or the hub.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.config.gguf_names import SUFFIX, choose_file, split_tag
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.regular_file import read_regular
from tokenmill.core.sampling_params import RECOMMENDED


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from `folder/name`; `{}` when there is no such file.

    Raises:
        InvalidCheckpoint: the file cannot be read or is not a JSON object.
    """
    path = folder / name
    try:
        return msgspec.json.decode(read_regular(path), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path} is not a JSON object: {error}") from error


_HUB_ID = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
_WEIGHTS = frozenset({".safetensors", ".gguf"})


def is_hub_id(model: str) -> bool:
    """Return True if a name can be an id of the hub, with a tag or without."""
    model, _ = split_tag(model)
    return not model.startswith(("/", "./", "../", "~")) and _HUB_ID.fullmatch(model) is not None


def has_only_gguf(folder: Path) -> bool:
    """Return True for a folder with weights in GGUF files alone, which is not yet one that parts of ours can read."""
    files = list(folder.iterdir())
    is_read = any(file.name == "model.gguf" for file in files) and (folder / "config.json").is_file()
    kinds = {file.suffix for file in files}
    return SUFFIX in kinds and ".safetensors" not in kinds and not is_read


def check_model(model: str, needs_weights: bool = True) -> None:
    """Check that a name leads to a checkpoint before anything expensive starts; loading checks its content.

    Raises:
        InvalidCheckpoint: the name leads to no checkpoint; the message contains no path.
    """
    place = Path(model).expanduser()
    if place.is_dir():
        if has_only_gguf(place):
            choose_file([file.name for file in place.iterdir()], None, "this folder")
        elif not (place / "config.json").is_file():
            raise InvalidCheckpoint("this folder has no config.json: it is not a checkpoint")
        elif needs_weights and not any(file.suffix in _WEIGHTS for file in place.iterdir()):
            raise InvalidCheckpoint("this folder has no weights: no file in it is .safetensors or .gguf")
    elif place.exists():
        if place.suffix != ".gguf" or not place.is_file():
            raise InvalidCheckpoint("this is neither a folder nor a .gguf file")
    elif not is_hub_id(model) and not Path(split_tag(model)[0]).expanduser().is_dir():
        raise InvalidCheckpoint("there is nothing at this path, and it is not a hub id such as owner/name")


def check_tokenizer(model: str, tokenizer: str | None) -> None:
    """Check that a folder has a tokenizer before anything expensive starts; loading checks its content.

    A model that is still to be downloaded passes: it comes with its tokenizer.

    Raises:
        InvalidCheckpoint: the folder has no tokenizer.
    """
    folder = Path(tokenizer or model)
    if folder.is_dir() and not (folder / "tokenizer.json").is_file() and not has_only_gguf(folder):
        raise InvalidCheckpoint(f"{folder} has no tokenizer.json")


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the ids that end a text: those of generation_config.json, else of config.json (an int or a list in both).

    Raises:
        InvalidCheckpoint: `eos_token_id` is neither an id nor a list of ids.
    """
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder, name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise InvalidCheckpoint(
                f"{folder / name}: eos_token_id must be a token id or a list of them, got {value!r}"
            )
        return frozenset(ids)
    return frozenset()


def check_eos_token_ids(folder: Path, vocab_size: int) -> None:
    """Check that the model's vocabulary has the ids that end a text: else no text would end by itself.

    Raises:
        InvalidCheckpoint: an id of generation_config.json is not in the vocabulary (those of config.json are checked
            where it is read); or see `eos_token_ids`.
    """
    missing = sorted(token_id for token_id in eos_token_ids(folder) if token_id >= vocab_size)
    if missing:
        raise InvalidCheckpoint(
            f"{folder / 'generation_config.json'}: eos_token_id {missing[0]} is not in the vocabulary of {vocab_size} "
            "tokens; put the id of the token that ends a text"
        )


def default_sampling(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters that the model's authors recommend in generation_config.json.

    The keys are fields of `SamplingParams`; they are the defaults of requests. `max_new_tokens` becomes `max_tokens`,
    as in vLLM, and `do_sample: false` is greedy, as in transformers.

    Raises:
        InvalidCheckpoint: the file is not a JSON object.
    """
    config = read_json(folder, "generation_config.json")
    defaults = {name: config[name] for name in RECOMMENDED if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = config["max_new_tokens"]
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults
