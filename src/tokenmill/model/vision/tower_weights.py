"""Read the weights of a vision tower: from a checkpoint's safetensors, or from the GGUF file beside a model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.stored_tensors import floats, tensor_of
from tokenmill.model.sharding.shard import Part
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.tower_shapes import PATCHES
from tokenmill.model.weights.checkpoint import open_checkpoint
from tokenmill.model.weights.gguf.file import GgufTensor, open_gguf
from tokenmill.model.weights.gguf.folder import TOWER_LINK_NAME
from tokenmill.model.weights.gguf.tower import stored_names
from tokenmill.model.weights.gguf.values import read_rows
from tokenmill.model.weights.stored_part import read_part

PREFIX = "visual."
# Of Gemma 3. SigLIP's head is stored, where it is, for other uses.
_POOLED_ROOTS, _POOLED_UNUSED = ("vision_tower.", "multi_modal_projector."), "vision_tower.head."
_POOLED_NAMES = {
    "patch_embed.proj.": "vision_tower.embeddings.patch_embedding.",
    "pos_embed.": "vision_tower.embeddings.position_embedding.",
    "blocks.": "vision_tower.encoder.layers.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.proj.": ".self_attn.out_proj.",
    ".mlp.linear_fc": ".mlp.fc",
    "merger.norm.": "vision_tower.post_layernorm.",
    "merger.pooled_norm.": "multi_modal_projector.mm_soft_emb_norm.",
    "merger.linear.weight": "multi_modal_projector.mm_input_projection_weight",
}
_GATED_NAMES = {
    ".mlp.linear_fc2.": ".mlp.down_proj.",
    "merger.norm.": "merger.ln_q.",
    "merger.linear_fc1.": "merger.mlp.0.",
    "merger.linear_fc2.": "merger.mlp.2.",
}


class _Stored(msgspec.Struct, frozen=True):
    """The tensors of a tower as they are stored.

    Attributes:
        where: the file to name when one is missing.
        names: returns the tensors that a weight is made of, in order, by the names that `shapes` and `read` know.
        shapes: of all tensors.
        has_split_patches: the patches' weight is stored for each frame.
    """

    where: Path
    names: Callable[[str], list[str]]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]
    has_split_patches: bool

    def piece_shape(self, name: str, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the shape of each of `count` pieces of a weight."""
        if self.has_split_patches and name == PATCHES:
            return (*shape[:2], *shape[3:])
        return tuple(shape) if count == 1 else (shape[0] // count, *shape[1:])

    def join(self, name: str, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Return a weight of its pieces."""
        if self.has_split_patches and name == PATCHES:
            return torch.stack(pieces, 2)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def read_tower(
    folder: Path, spec: VisionSpec, shapes: Mapping[str, tuple[int, ...]], like: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return all weights of a tower by name.

    Args:
        shapes: of all weights. like: has their dtype and device.

    Raises:
        InvalidCheckpoint: a tensor is missing, misshapen or surplus.
    """
    if spec.axial is not None:
        stored = _axial_in_checkpoint(folder)
    elif spec.is_pooled:
        stored = _pooled_in_checkpoint(folder)
    else:
        stored = _in_gguf(folder, spec) if (folder / TOWER_LINK_NAME).exists() else _in_checkpoint(folder, spec)
    names = {name: stored.names(name) for name in shapes}
    surplus = stored.shapes.keys() - {one for pieces in names.values() for one in pieces}
    if surplus:
        raise InvalidCheckpoint(f"{stored.where}: tensor {min(surplus)} has no place in the vision tower")
    weights = {}
    for name, shape in shapes.items():
        expected = stored.piece_shape(name, shape, len(names[name]))
        for one in names[name]:
            if one not in stored.shapes:
                raise InvalidCheckpoint(f"{stored.where} has no tensor {one}, which config.json calls for")
            if stored.shapes[one] != expected:
                raise InvalidCheckpoint(f"{stored.where}: tensor {one} is {stored.shapes[one]}, not {expected}")
        weights[name] = stored.join(name, [stored.read(one) for one in names[name]]).to(like)
    return weights


def _in_checkpoint(folder: Path, spec: VisionSpec) -> _Stored:
    checkpoint = open_checkpoint(folder)
    bare = {name.removeprefix("model."): one for name, one in checkpoint.tensors.items()}
    tensors = {name: one for name, one in bare.items() if name.startswith(PREFIX)}
    return _Stored(
        checkpoint.source,
        lambda name: [PREFIX + one for one in _names_in_checkpoint(name, spec)],
        {name: tuple(one.shape) for name, one in tensors.items()},
        lambda name: tensor_of(read_part(tensors[name], None, Part.whole(tensors[name].shape[0]))),
        has_split_patches=False,
    )


def _axial_in_checkpoint(folder: Path) -> _Stored:
    """Return the tensors of Gemma 4's tower, whose names are kept."""
    checkpoint = open_checkpoint(folder)
    bare = {name.removeprefix("model."): one for name, one in checkpoint.tensors.items()}
    tensors = {name: one for name, one in bare.items() if name.startswith(("vision_tower.", "embed_vision."))}
    return _Stored(
        checkpoint.source,
        lambda name: [name],
        {name: tuple(one.shape) for name, one in tensors.items()},
        lambda name: tensor_of(read_part(tensors[name], None, Part.whole(1))),
        has_split_patches=False,
    )


def _pooled_in_checkpoint(folder: Path) -> _Stored:
    """Return the tensors of Gemma 3's tower, whose projection is stored transposed."""
    checkpoint = open_checkpoint(folder)
    bare = {
        name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower."): one
        for name, one in checkpoint.tensors.items()
    }
    tensors = {name: one for name, one in bare.items() if name.startswith(_POOLED_ROOTS) and _POOLED_UNUSED not in name}
    turned = _POOLED_NAMES["merger.linear.weight"]

    def read(name: str) -> torch.Tensor:
        tensor = tensor_of(read_part(tensors[name], None, Part.whole(tensors[name].shape[0])))
        return tensor.T.contiguous() if name == turned else tensor

    shapes = {name: tuple(one.shape)[:: -1 if name == turned else 1] for name, one in tensors.items()}
    return _Stored(checkpoint.source, _pooled_names, shapes, read, has_split_patches=False)


def _pooled_names(name: str) -> list[str]:
    for ours, theirs in _POOLED_NAMES.items():
        name = name.replace(ours, theirs)
    if ".attn.qkv." not in name:
        return [name]
    return [name.replace(".attn.qkv.", f".self_attn.{part}_proj.") for part in "qkv"]


def _names_in_checkpoint(name: str, spec: VisionSpec) -> list[str]:
    if not spec.is_gated:
        return [name]
    if ".mlp.linear_fc1." in name:
        return [name.replace("linear_fc1", part) for part in ("gate_proj", "up_proj")]
    for ours, theirs in _GATED_NAMES.items():
        name = name.replace(ours, theirs)
    return [name]


def _in_gguf(folder: Path, spec: VisionSpec) -> _Stored:
    tower = open_gguf(folder / TOWER_LINK_NAME)
    return _Stored(
        tower.path,
        lambda name: stored_names(name, tower, spec.deepstack),
        {name: one.shape for name, one in tower.tensors.items()},
        lambda name: _floats(tower.tensors[name]),
        has_split_patches=True,
    )


def _floats(tensor: GgufTensor) -> torch.Tensor:
    return floats(read_rows(tensor)).view(tensor.shape)
