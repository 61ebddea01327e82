"""The vision tower of Qwen3-VL: patches of one image in, embeddings for the text model out. Plain torch.

    patches -> embed + resampled positions -> blocks -> merger -> [n, out_size]
                                               | after the deepstack blocks: a merger each -> [n, out_size]

Attention is full within the image. Described in the model's technical report and in transformers' qwen3_vl.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.parallel.shard import Part
from tokenmill.vision.spec import VisionSpec
from tokenmill.weights.checkpoint import open_checkpoint
from tokenmill.weights.stored_part import read_part

PREFIX = "model.visual."
EPS = 1e-6


class Tower:
    """A tower with its weights.

    Args:
        weights: by name, without the prefix, all of one dtype.
    """

    def __init__(self, spec: VisionSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self._weights = weights

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(weight.nbytes for weight in self._weights.values())

    def encode(self, pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
        """The embeddings of an image, and of each deepstack block.

        Args:
            pixels: [height, width, 3], both sides multiples of `spec.factor`.

        Returns:
            [n, 1 + deepstack, out_size] in the dtype of the weights; n = height * width / factor**2.
        """
        with torch.inference_mode():
            return self._encode(pixels)

    def _encode(self, pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
        spec = self.spec
        rows, columns = pixels.shape[0] // spec.patch_size, pixels.shape[1] // spec.patch_size
        x = functional.linear(self._patches(pixels), self._weights["patch_embed.proj.weight"].flatten(1))
        x = x + self._weights["patch_embed.proj.bias"]
        row, column = _places(rows, columns, spec.merge)
        x = x + self._table(row, rows, column, columns)
        cos, sin = self._angles(row, column)
        outputs = []
        for block in range(spec.depth):
            x = self._block(f"blocks.{block}", x, cos, sin)
            if block in spec.deepstack:
                name = f"deepstack_merger_list.{spec.deepstack.index(block)}"
                merged = self._norm(f"{name}.norm", self._merge(x))
                outputs.append(self._mlp(name, merged, "none"))
        merged = self._merge(self._norm("merger.norm", x))
        return torch.stack([self._mlp("merger", merged, "none"), *outputs], dim=1)

    def _patches(self, pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
        """[patches, 3 * frames * patch_size**2], normalized, in the order of merged groups."""
        spec, size, merge = self.spec, self.spec.patch_size, self.spec.merge
        values = torch.from_numpy(pixels).float().div(255)
        values = (values - torch.tensor(spec.mean)) / torch.tensor(spec.std)
        groups = values.view(len(values) // spec.factor, merge, size, values.shape[1] // spec.factor, merge, size, 3)
        patches = groups.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, size * size)
        return patches.expand(-1, -1, spec.frames, -1).flatten(1).to(self._weights["pos_embed.weight"].dtype)

    def _table(self, row: torch.Tensor, rows: int, column: torch.Tensor, columns: int) -> torch.Tensor:
        """The learned positions, resampled bilinearly from their square to a grid whose corners are the square's."""
        table, side = self._weights["pos_embed.weight"], self.spec.table_side
        (top, bottom), v = _between(row, rows, side)
        (left, right), h = _between(column, columns, side)
        corners = torch.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right], 1)
        shares = torch.stack([(1 - v) * (1 - h), (1 - v) * h, v * (1 - h), v * h], 1)
        return (table[corners] * shares.to(table.dtype).unsqueeze(2)).sum(1)

    def _angles(self, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [patches, 1, head_dim] float32: a quarter of a head turns by the row, the next by the column."""
        quarter = torch.arange(0, self.spec.hidden_size // self.spec.num_heads // 2, 2, dtype=torch.float32)
        frequencies = 1.0 / self.spec.theta ** (quarter / (2 * len(quarter)))
        half = torch.cat((torch.outer(row.float(), frequencies), torch.outer(column.float(), frequencies)), 1)
        angles = torch.cat((half, half), 1).unsqueeze(1)
        return angles.cos(), angles.sin()

    def _block(self, name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self._linear(f"{name}.attn.qkv", self._norm(f"{name}.norm1", x))
        q, k, v = qkv.view(len(x), 3, self.spec.num_heads, -1).unbind(1)
        q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
        attended = functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1).flatten(1)
        x = x + self._linear(f"{name}.attn.proj", attended)
        return x + self._mlp(f"{name}.mlp", self._norm(f"{name}.norm2", x), "tanh")

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        """The patches of a group side by side."""
        return x.view(-1, self.spec.hidden_size * self.spec.merge**2)

    def _mlp(self, name: str, x: torch.Tensor, approximate: str) -> torch.Tensor:
        hidden = functional.gelu(self._linear(f"{name}.linear_fc1", x), approximate=approximate)
        return self._linear(f"{name}.linear_fc2", hidden)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], EPS
        )


def load_tower(folder: Path, spec: VisionSpec, dtype: torch.dtype) -> Tower:
    """Read the tower of a checkpoint.

    Raises:
        InvalidCheckpoint: a tensor is missing, misshapen or surplus.
    """
    checkpoint, shapes = open_checkpoint(folder), tower_shapes(spec)
    stored = {name: one for name, one in checkpoint.tensors.items() if name.startswith(PREFIX)}
    for name, one in stored.items():
        if name.removeprefix(PREFIX) not in shapes:
            raise InvalidCheckpoint(f"{one.file}: tensor {name} has no place in the vision tower")
    weights = {}
    for name, shape in shapes.items():
        tensor = stored.get(PREFIX + name)
        if tensor is None:
            raise InvalidCheckpoint(f"{checkpoint.source} has no tensor {PREFIX}{name}, which config.json calls for")
        if tuple(tensor.shape) != shape:
            raise InvalidCheckpoint(f"{tensor.file}: tensor {tensor.name} is {tuple(tensor.shape)}, not {shape}")
        weights[name] = read_part(tensor, None, Part.whole(shape[0])).to(dtype)
    return Tower(spec, weights)


def tower_shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tower, without the prefix."""
    hidden, wide = spec.hidden_size, spec.hidden_size * spec.merge**2
    patch = (hidden, 3, spec.frames, spec.patch_size, spec.patch_size)
    shapes = {"patch_embed.proj.weight": patch, "patch_embed.proj.bias": (hidden,)}
    shapes["pos_embed.weight"] = (spec.table_side**2, hidden)

    def add(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    for block in range(spec.depth):
        add(f"blocks.{block}.norm1", hidden)
        add(f"blocks.{block}.norm2", hidden)
        add(f"blocks.{block}.attn.qkv", 3 * hidden, hidden)
        add(f"blocks.{block}.attn.proj", hidden, hidden)
        add(f"blocks.{block}.mlp.linear_fc1", spec.intermediate_size, hidden)
        add(f"blocks.{block}.mlp.linear_fc2", hidden, spec.intermediate_size)
    for name in ("merger", *(f"deepstack_merger_list.{i}" for i in range(len(spec.deepstack)))):
        add(f"{name}.norm", hidden if name == "merger" else wide)
        add(f"{name}.linear_fc1", wide, wide)
        add(f"{name}.linear_fc2", spec.out_size, wide)
    return shapes


def _places(rows: int, columns: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each patch, [rows * columns] int64 each, in the order of merged groups."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    groups = grid.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3).flatten(1)
    return groups[0], groups[1]


def _between(place: torch.Tensor, size: int, side: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The two of `side` entries that places on an axis of `size` lie between, and the share of the second."""
    exact = place.float() * (side - 1) / max(size - 1, 1)
    lower = exact.floor()
    return (lower.long(), (lower.long() + 1).clamp(max=side - 1)), exact - lower


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
