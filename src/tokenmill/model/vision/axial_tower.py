"""The vision tower of Gemma 4: patches of one image in, embeddings for the text model out.

    patches -> embed + a position for each axis -> blocks -> averages * sqrt(size) -> norm -> project -> [n, out_size]

A head's first half turns by the column of a patch, its second by the row. Described in transformers' gemma4. Runs in
torch whatever kernels the decoder has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from tokenmill.core.media import MediaInput
from tokenmill.model.attention.media_store import content_of
from tokenmill.model.vision.spec import AxialBlocks, VisionSpec
from tokenmill.model.vision.tower_shapes import AXIAL_PATCHES, AXIAL_POSITIONS, AXIAL_PROJECTION


class AxialTower:
    """A tower over its weights, all of one dtype, on one device.

    Args:
        weights: by the names of `axial_shapes`.
    """

    def __init__(self, spec: VisionSpec, weights: Mapping[str, torch.Tensor]) -> None:
        assert spec.axial is not None, "of Gemma 4"
        self.spec = spec
        self._axial: AxialBlocks = spec.axial
        self._weights = weights
        self.num_bytes = sum(weight.nbytes for weight in weights.values())

    def encode_input(self, one: MediaInput, content: torch.Tensor | None = None) -> torch.Tensor:
        """Return the embeddings of an image as a request brings it, see `encode`; `content`: see `Encode`."""
        size = self.spec.patch_size
        shape = one.span.rows * size, one.span.columns * size, 3
        return self.encode((content_of(one) if content is None else content).view(shape))

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of an image.

        Args:
            pixels: uint8, [height, width, 3], both sides multiples of `spec.factor`.

        Returns:
            [n, 1, out_size] in the dtype of the weights; n = height * width / factor**2.
        """
        with torch.inference_mode():
            return self._encode(pixels).unsqueeze(1)

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        spec, projection = self.spec, self._weights[AXIAL_PATCHES]
        rows, columns = pixels.shape[0] // spec.patch_size, pixels.shape[1] // spec.patch_size
        row = torch.arange(rows, device=projection.device).repeat_interleave(columns)
        column = torch.arange(columns, device=projection.device).repeat(rows)
        table = self._weights[AXIAL_POSITIONS]
        x = functional.linear(self._patches(pixels), projection) + (table[0][column] + table[1][row])
        cos, sin = self._angles(column, row)
        for block in range(spec.depth):
            name = f"vision_tower.encoder.layers.{block}"
            attended = self._attend(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x), cos, sin)
            x = x + self._norm(f"{name}.post_attention_layernorm", attended)
            middle = self._middle(f"{name}.mlp", self._norm(f"{name}.pre_feedforward_layernorm", x))
            x = x + self._norm(f"{name}.post_feedforward_layernorm", middle)
        pooled = x.float().view(rows // spec.merge, spec.merge, columns // spec.merge, spec.merge, -1).mean((1, 3))
        wide = pooled.flatten(0, 1).to(x.dtype).float() * spec.hidden_size**0.5
        if self._axial.standardizes:
            bias, scale = (self._weights[f"vision_tower.std_{part}"].float() for part in ("bias", "scale"))
            wide = (wide - bias) * scale
        return functional.linear(self._normed(wide.to(x.dtype)), self._weights[AXIAL_PROJECTION])

    def _patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return [patches, patch_size**2 * 3], from -1 to 1, row by row."""
        size, weight = self.spec.patch_size, self._weights[AXIAL_PATCHES]
        values = 2 * (pixels.to(weight.device).float().div(255) - 0.5)
        height, width, _ = values.shape
        groups = values.view(height // size, size, width // size, size, 3).permute(0, 2, 1, 3, 4)
        return groups.reshape(-1, size * size * 3).to(weight.dtype)

    def _angles(self, column: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [patches, 1, head_dim / 4] of each axis in a last dimension of two."""
        half = self._axial.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=row.device) / half
        frequencies = 1.0 / self.spec.theta**exponents
        angles = torch.stack([torch.outer(axis.float(), frequencies) for axis in (column, row)], 1).unsqueeze(1)
        return angles.cos(), angles.sin()

    def _attend(self, name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the attention of x [patches, hidden_size] within the image, projected."""
        heads, kv_heads, size = self.spec.num_heads, self._axial.num_kv_heads, self._axial.head_dim
        q = self._linear(f"{name}.q_proj", x).view(-1, heads, size)
        k, v = (self._linear(f"{name}.{part}_proj", x).view(-1, kv_heads, size) for part in "kv")
        q, k = (_turned(self._norm(f"{name}.{part}_norm", one), cos, sin) for part, one in (("q", q), ("k", k)))
        k, v = (one.repeat_interleave(heads // kv_heads, 1) for one in (k, self._normed(v)))
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self._linear(f"{name}.o_proj", attended.transpose(0, 1).flatten(1))

    def _middle(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate = functional.gelu(self._linear(f"{name}.gate_proj", x), approximate="tanh")
        return self._linear(f"{name}.down_proj", gate * self._linear(f"{name}.up_proj", x))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply by a matrix, whose inputs and outputs may have bounds."""
        weight = self._weights[f"{name}.linear.weight"]
        if not self._axial.clips:
            return functional.linear(x, weight)
        bounds = [self._weights[f"{name}.{side}_{end}"] for side in ("input", "output") for end in ("min", "max")]
        return functional.linear(x.clamp(bounds[0], bounds[1]), weight).clamp(bounds[2], bounds[3])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._normed(x, self._weights[f"{name}.weight"])

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Return the RMSNorm of x over its last dimension, computed in float32."""
        wide = x.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + self._axial.eps).pow(-0.5)
        return (normed if weight is None else normed * weight.float()).to(x.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each half of the heads x [patches, heads, head_dim] by the angles of its axis."""
    halves = x.unflatten(-1, (2, -1))
    first, second = halves.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
