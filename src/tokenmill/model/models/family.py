"""A family: how its config.json is read, and what its weights are called, in checkpoints and in GGUF files.

Knows no torch, and none of the families; each is a file of `families/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.mlp_spec import ExpertStack
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.gguf_table import GgufTable
from tokenmill.model.models.weight_names import LLAMA_NAMES


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The models that go by one name in `architectures` of config.json.

    Attributes:
        read: reads the decoder, all but its name and the names of its weights, unless forms of it have different
            ones. Most is read by the functions of `decoder_config`, `attention_config`, `mlp_config` and `layer_kinds`.
        defaults: values of fields that may be absent.
        has_text_config: the config of the decoder is a part of the file, if there is such a part.
        weight_names: names of the weights in checkpoints.
        other_weights: name prefixes of weights that are not the decoder's.
        optional_prefix: of the names of all weights, where a checkpoint has it.
        expert_stack: how checkpoints may store all experts of a layer in one tensor; None: each has tensors of its own.
        takes_images: a vision tower stands beside the decoder, where the config has one.
        takes_sound: an encoder of sound does.
        gguf: its form in GGUF files; None: these are not read.
    """

    read: Callable[[ConfigReader], Architecture]
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    has_text_config: bool = False
    weight_names: Mapping[str, str] = msgspec.field(default_factory=lambda: LLAMA_NAMES)
    other_weights: tuple[str, ...] = ()
    optional_prefix: str = ""
    expert_stack: ExpertStack | None = None
    takes_images: bool = False
    takes_sound: bool = False
    gguf: GgufTable | None = None
