"""Read an EAGLE-3 head's config.json, in the forms of vLLM, SGLang and speculators. Opens no file.

    vLLM, SGLang    Llama's fields, `draft_vocab_size` and others beside them
    speculators     `speculators_model_type`; Llama's fields are in `transformer_layer_config`

Whether it has an embedding, an output head and norms of its own its tensors say, whose names differ by form, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.draft_head_spec import DraftHeadSpec, TapNorm
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.families import FAMILIES
from tokenmill.model.models.weight_names import LLAMA_NAMES

NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# What speculators calls itself in `speculators_model_type`, and its config of the layer.
SPECULATORS_TYPE, SPECULATORS_LAYER = "eagle3", "transformer_layer_config"
BOUNDARIES = "eagle_aux_hidden_state_layer_ids"
USUAL_TAPS = 3
LAYER_FAMILY = "LlamaForCausalLM"
# Llama's values of fields that may be absent. Ids that end texts are the target's business.
_DEFAULTS: Mapping[str, Any] = MappingProxyType({"max_position_embeddings": 2048, "num_hidden_layers": 1})
# Tensors that are not the decoder's: ids, read apart, and copies of the target's matrices.
_OTHERS = ("d2t", "t2d", "verifier_lm_head", "verifier_norm")


def is_draft_head(fields: Mapping[str, Any]) -> bool:
    """Return True if a config.json describes an EAGLE-3 head, whether or not all of it is supported."""
    names = fields.get("architectures")
    is_named = isinstance(names, list) and any("eagle" in str(name).lower() for name in names)
    return is_named or "speculators_model_type" in fields


def read_draft_head(fields: Mapping[str, Any], source: str, tensors: Collection[str]) -> Architecture:
    """Return the architecture of a head.

    Args:
        fields: the parsed config.json. source: its name in error messages.
        tensors: names of the tensors in its checkpoint.

    Raises:
        InvalidCheckpoint: it is another kind of head, or a value is not supported; names the source and the field.
    """
    config = ConfigReader(fields, source, _DEFAULTS)
    is_speculators = _check_kind(config)
    layer_fields = config.raw(SPECULATORS_LAYER) if is_speculators else fields
    if not isinstance(layer_fields, dict):
        raise config.error(f"{SPECULATORS_LAYER} must be an object")
    unused = ("eos_token_id", "bos_token_id", "pad_token_id")
    layer_fields = {name: value for name, value in layer_fields.items() if name not in unused}
    base = FAMILIES[LAYER_FAMILY].read(ConfigReader(layer_fields, source, _DEFAULTS))
    if len(base.layers) != 1:
        raise config.error(f"num_hidden_layers {len(base.layers)} is not supported: an EAGLE-3 head of one layer is")
    names, found = _names(tensors)
    (layer,) = base.layers
    assert layer.attention is not None, "Llama's layers attend"
    attention = msgspec.structs.replace(layer.attention, num_inputs=2, first_key=1)
    begins_normed = config.boolean("norm_before_residual", is_speculators)
    layer = msgspec.structs.replace(layer, attention=attention, takes_pair=True, begins_normed=begins_normed)
    return msgspec.structs.replace(
        base,
        name=NAMES[0],
        layers=(layer,),
        weight_names=names,
        other_weights=_OTHERS,
        tie_embeddings=False,
        draft_head=_read_spec(config, base, found),
    )


def _check_kind(config: ConfigReader) -> bool:
    """Check that it is an EAGLE-3 head; return True if it is in the form of speculators."""
    kind = config.raw("speculators_model_type")
    if kind is not None:
        if kind != SPECULATORS_TYPE:
            raise config.error(f"speculators_model_type {kind!r} is not supported; supported: {SPECULATORS_TYPE}")
        return True
    names = config.raw("architectures")
    if not isinstance(names, list) or not names or names[0] not in NAMES:
        raise config.error(f"architectures {names!r} is no EAGLE-3 head that is supported: {', '.join(NAMES)}")
    return False


def _read_spec(config: ConfigReader, base: Architecture, found: Collection[str]) -> DraftHeadSpec:
    boundaries = _read_boundaries(config)
    norm: TapNorm = "none"
    if config.boolean("norm_before_fc", "taps_norm" in found):
        norm = "together"
    elif config.boolean("fc_norm", "tap_norm_0" in found):
        norm = "apart"
    return DraftHeadSpec(
        num_taps=USUAL_TAPS if boundaries is None else len(boundaries),
        tapped_size=config.integer("target_hidden_size", base.hidden_size),
        boundaries=boundaries,
        vocab_size=config.integer("draft_vocab_size", base.vocab_size, high=base.vocab_size),
        tap_norm=norm,
        recycles_normed=config.boolean("norm_output", False),
        has_embedding="embedding" in found,
        has_head="head" in found,
    )


def _read_boundaries(config: ConfigReader) -> tuple[int, ...] | None:
    """Read where the target is tapped, at top level or in `eagle_config`."""
    part = config.raw("eagle_config", {})
    if not isinstance(part, dict):
        raise config.error("eagle_config must be an object")
    if part.get("use_aux_hidden_state") is False:
        raise config.error("use_aux_hidden_state false is not supported: such a head takes the last layer's output")
    numbers = config.raw(BOUNDARIES, part.get(BOUNDARIES))
    if numbers is None:
        return None
    if not isinstance(numbers, list) or not numbers or any(type(one) is not int or one < 0 for one in numbers):
        raise config.error(f"{BOUNDARIES} must be numbers of layers, got {numbers!r}")
    return tuple(numbers)


def _names(tensors: Collection[str]) -> tuple[Mapping[str, str], set[str]]:
    """Return what a head's tensors are called, and the roles of those in the checkpoint."""
    root = "model." if "model.fc.weight" in tensors else ""
    layer = f"{root}layers.0" if f"{root}layers.0.hidden_norm.weight" in tensors else f"{root}midlayer"
    names = {
        role: name.replace("model.layers.{layer}", layer).replace("model.", root) for role, name in LLAMA_NAMES.items()
    }
    names |= {"hidden_norm": f"{layer}.hidden_norm", "taps": f"{root}fc", "taps_norm": f"{root}input_norm"}
    names |= {f"tap_norm_{index}": f"{root}fc_norm.{index}" for index in range(USUAL_TAPS * 3)}
    return MappingProxyType(names), {role for role, name in names.items() if f"{name}.weight" in tensors}
