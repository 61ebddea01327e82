"""The encoder of Whisper, and that of Qwen2-Audio, which adds an average and a projection: samples in, embeddings out.

    log-mel -> conv, GELU -> conv of every second, GELU -> + positions -> layers -> mean of two -> norm -> projection

All of a clip sees all of it. Whisper hears the silence to which it is padded; Qwen2-Audio does not: that is left out
before the layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.media import MediaInput
from tokenmill.model.attention.media_store import content_of
from tokenmill.model.audio.features import clip_features, mel_bins
from tokenmill.model.audio.shapes import PROJECTOR, encoder_shapes
from tokenmill.model.audio.spec import POOLED, AudioSpec
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.kernels.stored_tensors import tensor_of, tensor_over
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.checkpoint import open_checkpoint
from tokenmill.model.weights.stored_part import read_part

_EPS = 1e-5
# What transformers keeps float16 below.
_HALF_MOST = torch.finfo(torch.float16).max - 1000


class SoundEncoder:
    """An encoder of sound in torch; `weights` by the names of `encoder_shapes`, of one dtype, on one device."""

    def __init__(self, spec: AudioSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self._weights = weights
        self._like = weights[f"{spec.tower}conv1.weight"]
        self._bins = torch.from_numpy(mel_bins(spec.num_bins)).to(self._like.device, torch.float32)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(weight.nbytes for weight in self._weights.values())

    def encode_input(self, one: MediaInput, content: torch.Tensor | None = None) -> torch.Tensor:
        """Return the embeddings of a clip as a request brings it, [n, 1, out_size]; `content`: see `Encode`."""
        samples = content_of(one) if content is None else content
        return self.encode(samples.view(torch.float32)).unsqueeze(1)

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of a clip: [n] float32 -> [`spec.num_tokens(n)`, out_size]."""
        with torch.inference_mode():
            return self._encode(samples)

    def _encode(self, samples: torch.Tensor) -> torch.Tensor:
        spec, count = self.spec, self.spec.num_positions(len(samples))
        mel = clip_features(samples.to(self._like.device), spec, self._bins).to(self._like.dtype)
        x = functional.gelu(self._conv("conv1", mel, 1))
        x = functional.gelu(self._conv("conv2", x, 2)).T[:count]
        x = x + self._weights[f"{spec.tower}embed_positions.weight"][:count]
        for layer in range(spec.depth):
            x = self._layer(f"{spec.tower}layers.{layer}.", x)
        if spec.is_whole:
            return self._norm(f"{spec.tower}layer_norm", x)
        pooled = x[: count // POOLED * POOLED].view(-1, POOLED, spec.hidden_size).mean(1)
        return self._linear(f"{PROJECTOR}linear", self._norm(f"{spec.tower}layer_norm", pooled))

    def _layer(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(f"{name}self_attn.", self._norm(f"{name}self_attn_layer_norm", x))
        middle = functional.gelu(self._linear(f"{name}fc1", self._norm(f"{name}final_layer_norm", x)))
        x = x + self._linear(f"{name}fc2", middle)
        return x.clamp(-_HALF_MOST, _HALF_MOST) if x.dtype == torch.float16 else x

    def _attend(self, name: str, x: torch.Tensor) -> torch.Tensor:
        heads = self.spec.num_heads
        scale = (self.spec.hidden_size // heads) ** -0.5
        q = self._linear(f"{name}q_proj", x) * scale
        parts = (q, self._linear(f"{name}k_proj", x), self._linear(f"{name}v_proj", x))
        q, k, v = (part.view(1, len(x), heads, -1).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self._linear(f"{name}out_proj", attended.transpose(1, 2).reshape(len(x), -1))

    def _conv(self, name: str, x: torch.Tensor, stride: int) -> torch.Tensor:
        weight, bias = (self._weights[f"{self.spec.tower}{name}.{kind}"] for kind in ("weight", "bias"))
        return functional.conv1d(x.unsqueeze(0), weight, bias, stride, padding=1).squeeze(0)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], _EPS
        )


def load_encoder(folder: Path, spec: AudioSpec, kernels: Kernels) -> SoundEncoder:
    """Read the encoder of a checkpoint, of the dtype and the device of the model's kernels.

    Raises:
        InvalidCheckpoint: a tensor is missing, misshapen or surplus.
    """
    checkpoint, like = open_checkpoint(folder), tensor_over(kernels.vector(0))
    bare = {name.removeprefix("model."): one for name, one in checkpoint.tensors.items()}
    tensors = {name: one for name, one in bare.items() if name.startswith((spec.tower, PROJECTOR))}
    shapes = encoder_shapes(spec)
    if surplus := tensors.keys() - shapes.keys():
        raise InvalidCheckpoint(f"{checkpoint.source}: tensor {min(surplus)} has no place in the encoder of sound")
    weights = {}
    for name, shape in shapes.items():
        if name not in tensors:
            raise InvalidCheckpoint(f"{checkpoint.source} has no tensor {name}, which config.json calls for")
        stored = tensors[name]
        if tuple(stored.shape) != shape:
            raise InvalidCheckpoint(f"{checkpoint.source}: tensor {name} is {tuple(stored.shape)}, not {shape}")
        weights[name] = tensor_of(read_part(stored, None, Part.whole(stored.shape[0]))).to(like)
    return SoundEncoder(spec, weights)
