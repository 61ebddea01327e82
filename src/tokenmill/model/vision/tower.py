"""The vision towers of Qwen3-VL, Qwen2.5-VL and Gemma 3: patches of one image in, embeddings for the text model out.

    patches -> embed + resampled positions -> blocks -> merger -> [n, out_size]
                                               | after the deepstack blocks: a merger each -> [n, out_size]

Attention is full within the image; in most blocks of Qwen2.5-VL, within windows of it, by which the patches are ordered
then. Gemma 3 averages patches instead of merging them by an MLP. Described in the models' technical reports and in
transformers' qwen3_vl, qwen2_5_vl, siglip and gemma3.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional

from tokenmill.core.media import MediaInput
from tokenmill.model.attention.media_store import content_of
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.vision.axial_tower import AxialTower
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.tower_parts import EPS, TorchParts, TowerParts
from tokenmill.model.vision.tower_shapes import PATCHES, tower_shapes
from tokenmill.model.vision.tower_weights import read_tower


class Tower:
    """A tower over its parts, which have the weights."""

    def __init__(self, spec: VisionSpec, parts: TowerParts) -> None:
        self.spec = spec
        self._parts = parts
        self._mean, self._std = (torch.tensor(one).to(parts.device) for one in (spec.mean, spec.std))

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self._parts.num_bytes

    def encode_input(self, one: MediaInput, content: torch.Tensor | None = None) -> torch.Tensor:
        """Return the embeddings of an image as a request brings it, see `encode`; `content`: see `Encode`."""
        size = self.spec.patch_size
        shape = -1, one.span.rows * size, one.span.columns * size, 3
        return self.encode((content_of(one) if content is None else content).view(shape))

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of an image, or of frames of a video encoded as one; and of each deepstack block.

        Args:
            pixels: uint8, [1 or `spec.frames`, height, width, 3], both sides multiples of `spec.factor`.

        Returns:
            [n, 1 + deepstack, out_size] in the dtype of the weights; n = height * width / factor**2.
        """
        with torch.inference_mode():
            return self._encode(pixels)

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        spec, parts = self.spec, self._parts
        rows, columns = pixels.shape[1] // spec.patch_size, pixels.shape[2] // spec.patch_size
        row, column = _places(rows, columns, spec.merge, parts.device)
        x, half = parts.linear("patch_embed.proj", self._patches(pixels)), self._angles(row, column)
        if parts.positions is not None:
            x = x + self._table(parts.positions, row, rows, column, columns)
        whole = windowed = parts.angles(half, [len(x)])
        order = None
        if spec.window:
            order, lengths = window_order(rows // spec.merge, columns // spec.merge, spec.window, parts.device)
            x, half = (self._side_by_side(one)[order].view(one.shape) for one in (x, half))
            whole = parts.angles(half, [len(x)])
            windowed = parts.angles(half, [spec.merge**2 * length for length in lengths])
        outputs = []
        delta: torch.Tensor | None = None
        for block in range(spec.depth):
            angles = windowed if spec.window and block not in spec.full_blocks else whole
            delta = self._block(f"blocks.{block}", x, delta, angles)
            if block in spec.deepstack:
                x, delta = x.add_(delta), None
                name = f"deepstack_merger_list.{spec.deepstack.index(block)}"
                outputs.append(self._merged(name, parts.norm(f"{name}.norm", self._side_by_side(x))))
        normed = parts.norm("merger.norm", x, delta)
        if parts.pooled_norm is not None:
            return self._pooled(normed, parts.pooled_norm).unsqueeze(1)
        merged = self._side_by_side(normed)
        encoded = torch.stack([self._merged("merger", merged), *outputs], dim=1)
        return encoded if order is None else torch.empty_like(encoded).index_copy_(0, order, encoded)

    def _block(self, name: str, x: torch.Tensor, delta: torch.Tensor | None, angles: object) -> torch.Tensor:
        """Add `delta` and the attention's output to x, in place; return what the block's last part adds."""
        parts = self._parts
        attended = parts.attend(parts.linear(f"{name}.attn.qkv", parts.norm(f"{name}.norm1", x, delta)), angles)
        normed = parts.norm(f"{name}.norm2", x, parts.linear(f"{name}.attn.proj", attended))
        return parts.linear(f"{name}.mlp.linear_fc2", parts.middle(f"{name}.mlp.linear_fc1", normed))

    def _merged(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._parts.linear(f"{name}.linear_fc2", functional.gelu(self._parts.linear(f"{name}.linear_fc1", x)))

    def _pooled(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Return the projected averages of groups of patches, whose RMSNorm is in float32."""
        pooled = x.view(-1, self.spec.merge**2, x.shape[1]).mean(1).float()
        scaled = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + EPS)
        return self._parts.linear("merger.linear", (scaled * (1 + norm.float())).to(x.dtype))

    def _side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """Return the patches of a group as one row."""
        return x.view(-1, x.shape[1] * self.spec.merge**2)

    def _patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return [patches, 3 * frames * patch_size**2], normalized, in the order of merged groups."""
        spec, size, merge = self.spec, self.spec.patch_size, self.spec.merge
        values = pixels.to(self._parts.device).float().div(255)
        values = (values - self._mean) / self._std
        frames, height, width, _ = values.shape
        groups = values.view(frames, height // spec.factor, merge, size, width // spec.factor, merge, size, 3)
        patches = groups.permute(1, 4, 2, 5, 7, 0, 3, 6).reshape(-1, 3, frames, size * size)
        return patches.expand(-1, -1, spec.frames, -1).flatten(1).to(self._parts.dtype)

    def _table(
        self, table: torch.Tensor, row: torch.Tensor, rows: int, column: torch.Tensor, columns: int
    ) -> torch.Tensor:
        """Return the learned positions, resampled bilinearly from their square to a grid with the same corners."""
        side = self.spec.table_side
        (top, bottom), v = _between(row, rows, side)
        (left, right), h = _between(column, columns, side)
        corners = torch.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right], 1)
        shares = torch.stack([(1 - v) * (1 - h), (1 - v) * h, v * (1 - h), v * h], 1)
        return (table[corners] * shares.to(table.dtype).unsqueeze(2)).sum(1)

    def _angles(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Return [patches, head_dim / 2] float32: a quarter of a head turns by the row, the next by the column."""
        head_dim = self.spec.hidden_size // self.spec.num_heads
        if not self.spec.theta:
            return torch.zeros(len(row), head_dim // 2, device=row.device)
        quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=row.device)
        frequencies = 1.0 / self.spec.theta ** (quarter / (2 * len(quarter)))
        return torch.cat((torch.outer(row.float(), frequencies), torch.outer(column.float(), frequencies)), 1)


def load_tower(folder: Path, spec: VisionSpec, kernels: Kernels) -> Tower | AxialTower:
    """Read the tower of a checkpoint, for the kernels that the model runs on.

    Raises:
        InvalidCheckpoint: a tensor is missing, misshapen or surplus.
    """
    weights = read_tower(folder, spec, tower_shapes(spec), tensor_over(kernels.vector(0)))
    return Tower(spec, make_parts(spec, weights, kernels)) if spec.axial is None else AxialTower(spec, weights)


def make_parts(spec: VisionSpec, weights: dict[str, torch.Tensor], kernels: Kernels) -> TowerParts:
    """Make the parts of a tower on these kernels.

    Args:
        weights: by name, as `tower_shapes` has them, of the kernels' dtype and device.
    """
    weights[PATCHES] = weights[PATCHES].flatten(1)
    if kernels.name == "native":
        # Imported here: these modules need the extension.
        from tokenmill.model.kernels.native_kernels import NativeKernels
        from tokenmill.model.vision.native_parts import NativeParts

        assert isinstance(kernels, NativeKernels)
        return NativeParts(kernels.native, weights, spec.num_heads, spec.is_gated)
    if kernels.name == "triton":
        from tokenmill.model.vision.triton_parts import TritonParts

        return TritonParts(weights, spec.num_heads, spec.is_gated)
    return TorchParts(weights, spec.num_heads, spec.is_gated)


def window_order(
    rows: int, columns: int, window: int, device: torch.device | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Return a grid's places ordered by squares of `window`, [rows * columns] int64; and the size of each square."""
    places = torch.arange(rows * columns, device=device).view(rows, columns)
    squares = [part for band in places.split(window) for part in band.split(window, 1)]
    return torch.cat([square.flatten() for square in squares]), [square.numel() for square in squares]


def _places(rows: int, columns: int, merge: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of each patch, [rows * columns] int64 each, in the order of merged groups."""
    axes = torch.arange(rows, device=device), torch.arange(columns, device=device)
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))
    groups = grid.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3).flatten(1)
    return groups[0], groups[1]


def _between(place: torch.Tensor, size: int, side: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the two of `side` entries that places on an axis of `size` lie between, and the share of the second."""
    exact = place.float() * (side - 1) / max(size - 1, 1)
    lower = exact.floor()
    return (lower.long(), (lower.long() + 1).clamp(max=side - 1)), exact - lower
