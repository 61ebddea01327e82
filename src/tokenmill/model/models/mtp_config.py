"""Read what a model's own checkpoint keeps for drafting: a layer of multi-token prediction. Opens no file.

    checkpoints     mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc}, mtp.layers.0.*, mtp.norm; the number of layers
                    is mtp_num_hidden_layers, one where it is absent
    GGUF files      blk.N.nextn.{enorm, hnorm, eh_proj, shared_head_norm}, blk.N.* behind the model's own layers

Qwen3-Next and Qwen3.5 have it (DeepSeek-V3, arXiv 2412.19437, section 2.2, is where it is from): a layer like those of
the model that attend, over a projection of a token's embedding beside the model's last hidden state before it.
Embedding and output head are the model's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidConfig
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.draft_head_spec import DraftHeadSpec
from tokenmill.model.architecture.mlp_spec import ExpertStack
from tokenmill.model.models.config_reader import ConfigReader

ROOT = "mtp."
NUM_LAYERS = "mtp_num_hidden_layers"
# Where the decoder's tensors are: alone, or beside a tower.
_LAYER_ROOTS = ("model.language_model.layers.", "model.layers.")


def num_mtp_layers(fields: Mapping[str, Any], source: str, tensors: Collection[str]) -> int:
    """Return how many layers a checkpoint has for drafting.

    Args:
        fields: the parsed config.json. source: its name in error messages. tensors: names of the tensors.

    Raises:
        InvalidCheckpoint: their number is none.
    """
    part = fields.get("text_config")
    config = ConfigReader({**(part if isinstance(part, dict) else {}), **fields}, source)
    return config.integer(NUM_LAYERS, 1) if f"{ROOT}fc.weight" in tensors else 0


def read_mtp(target: Architecture, num_layers: int, source: str) -> Architecture:
    """Return the architecture of the drafting layer of a model.

    Args:
        target: the model's architecture. num_layers: such layers in its checkpoint. source: its name in messages.

    Raises:
        InvalidConfig: there is no such layer, or there are several.
    """
    if num_layers != 1:
        found = f"{num_layers} MTP layers: one, run again, is supported" if num_layers else f"no tensors {ROOT}*"
        raise InvalidConfig(f"--speculative-config: the checkpoint {source} has {found}; take suffix in place of mtp")
    layer = next(one for one in target.layers if one.attention is not None)
    assert layer.attention is not None, "it is one that attends"
    attention = msgspec.structs.replace(layer.attention, first_key=1)
    return msgspec.structs.replace(
        target,
        layers=(msgspec.structs.replace(layer, attention=attention),),
        weight_names=_names(target.weight_names),
        expert_stack=None if target.expert_stack is None else _stack(target.expert_stack),
        other_weights=("model.", "lm_head."),
        tie_embeddings=False,
        draft_head=DraftHeadSpec(
            num_taps=1,
            tapped_size=target.hidden_size,
            boundaries=(len(target.layers),),
            vocab_size=target.vocab_size,
            recycles_normed=True,
            has_head=False,
            projects_pairs=True,
        ),
    )


def _names(names: Mapping[str, str]) -> Mapping[str, str]:
    """Return what the tensors of the drafting layer are called, given the model's table."""
    found = {role: _renamed(name) for role, name in names.items()}
    found |= {"final_norm": f"{ROOT}norm", "taps": f"{ROOT}fc"}
    found |= {"hidden_norm": f"{ROOT}pre_fc_norm_hidden", "embedding_norm": f"{ROOT}pre_fc_norm_embedding"}
    return MappingProxyType(found)


def _stack(stack: ExpertStack) -> ExpertStack:
    return msgspec.structs.replace(stack, gate_up=_renamed(stack.gate_up), down=_renamed(stack.down))


def _renamed(name: str) -> str:
    for root in _LAYER_ROOTS:
        name = name.replace(root, f"{ROOT}layers.")
    return name
