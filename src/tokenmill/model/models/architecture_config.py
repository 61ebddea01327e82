"""config.json -> `Architecture`, by the reader of its family.

Written against the configs that transformers 4 and 5 save: version 5 has `rope_parameters` and `dtype` where version 4
has `rope_theta` with `rope_scaling` and `torch_dtype`. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.families import FAMILIES

# Ends of the names of decoders that do not generate.
_WITHOUT_HEAD = ("ForSequenceClassification", "Model")


def read_architecture(fields: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """Return the architecture that a config.json describes.

    Args:
        fields: the parsed file.
        source: its name in error messages, e.g. its path.

    Raises:
        InvalidCheckpoint: the architecture, a feature or a value is not supported; names the source and the field.
    """
    name = _architecture_name(fields, source)
    family = FAMILIES[_family_name(name)]
    if family.has_text_config and ("text_config" in fields or "hidden_size" not in fields):
        # What stands beside the decoder's config wins over what stands in it.
        fields = {**_part(fields, "text_config", source), **fields}
    takes_images = family.takes_images and fields.get("vision_config") is not None
    own = family.read(ConfigReader(fields, source, family.defaults))
    architecture = msgspec.structs.replace(
        own,
        name=name,
        weight_names=own.weight_names or family.weight_names,
        takes_images=takes_images,
        takes_sound=family.takes_sound,
        other_weights=family.other_weights,
        optional_prefix=family.optional_prefix,
        expert_stack=family.expert_stack,
    )
    if "gguf_pooling" in fields:
        other_weights = (*architecture.other_weights, "cls.", *(f"{name}." for name in fields.get("gguf_layers", ())))
        architecture = msgspec.structs.replace(architecture, other_weights=other_weights)
    if name not in FAMILIES or (architecture.has_head and name.endswith(_WITHOUT_HEAD)):
        return _without_head(architecture, fields, source)
    return architecture


def _without_head(architecture: Architecture, fields: Mapping[str, Any], source: str) -> Architecture:
    """Return the architecture of a decoder that does not generate: it stores no output head, but perhaps its own.

    Raises:
        InvalidCheckpoint: its tokens attend to those behind them, too, and the family has no such form.
    """
    for field in ("is_causal", "use_bidirectional_attention"):
        if fields.get(field) is (field != "is_causal") and architecture.needs_kv:
            raise ConfigReader(fields, source).error(f"{field} {fields[field]!r} is not supported: decoders are causal")
    # The embedding stands for the head: it is asked for a token that nobody wants.
    return msgspec.structs.replace(
        architecture,
        tie_embeddings=True,
        other_weights=(*architecture.other_weights, "lm_head.", "score.", "classifier."),
    )


def _family_name(name: str) -> str:
    """Return the decoder that generates, of one that embeds or classifies: `Qwen3Model` is `Qwen3ForCausalLM`."""
    if name in FAMILIES:
        return name
    stems = [name.removesuffix(suffix).removesuffix("Text") for suffix in _WITHOUT_HEAD if name.endswith(suffix)]
    known = (stem + end for stem in stems for end in ("ForCausalLM", "Model") if stem + end in FAMILIES)
    return next(known, name)


def _part(fields: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """Return an object in a config.

    Raises:
        InvalidCheckpoint: it is no object.
    """
    part = fields.get(name)
    if not isinstance(part, dict):
        raise ConfigReader(fields, source).error(f"{name} must be an object")
    return {key: value for key, value in part.items() if key != "architectures"}


def _architecture_name(fields: Mapping[str, Any], source: str) -> str:
    supported = ", ".join(FAMILIES)
    names = fields.get("architectures")
    config = ConfigReader(fields, source)
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.error(f"architectures must name the model's architecture; supported: {supported}")
    if _family_name(names[0]) not in FAMILIES:
        raise config.error(f"architecture {names[0]} is not supported; supported: {supported}")
    return names[0]
