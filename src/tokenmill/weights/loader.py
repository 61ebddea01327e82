"""Streams a checkpoint into a decoder, tensor by tensor, so that the peak of memory is close to the model's size."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import InvalidCheckpoint
from tokenmill.kernels.protocol import Kernels
from tokenmill.kernels.torch_kernels import TorchKernels
from tokenmill.models.architecture import Architecture
from tokenmill.models.decoder import Decoder
from tokenmill.weights.checkpoint import Checkpoint, open_checkpoint
from tokenmill.weights.safetensors_header import StoredTensor

Progress = Callable[[int, int], None]

FLOAT_DTYPES = ("F32", "F16", "BF16")
DUMMY_SEED = 0
# Tables that old checkpoints store although they follow from the config.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def load_model(
    folder: Path,
    architecture: Architecture,
    kernels: Kernels,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> Decoder:
    """A decoder with the weights of a folder, in the form of the kernels.

    Args:
        load_format: `auto` or `safetensors`: read the folder; `dummy`: seeded random weights, no weight file needed.
        progress: called with (bytes done, bytes in all) of the checkpoint, once before and after each tensor.

    Raises:
        InvalidCheckpoint: anything missing, truncated, misshapen or surplus; found before memory is taken.
    """
    report = progress or (lambda done, total: None)
    if load_format == "dummy":
        return _dummy(Decoder(architecture, kernels), kernels.dtype, report)
    checkpoint = open_checkpoint(folder)
    shapes = Decoder(architecture, TorchKernels(kernels.dtype, "meta"))
    wanted = {target.name: target.shape for target in shapes.targets()}
    _check(checkpoint, wanted, architecture.tie_embeddings)
    decoder = Decoder(architecture, kernels)
    _fill(decoder, [checkpoint.tensors[name] for name in wanted], report)
    return decoder


def _check(checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]], tied: bool) -> None:
    """Every wanted tensor is there with its shape and a float dtype, and nothing is left over."""
    for name, shape in wanted.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise InvalidCheckpoint(f"{checkpoint.source} has no tensor {name}, which config.json calls for")
        if stored.shape != shape:
            raise InvalidCheckpoint(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}, config.json calls for {list(shape)}"
            )
        if stored.dtype not in FLOAT_DTYPES:
            raise InvalidCheckpoint(
                f"{stored.file}: tensor {name} has dtype {stored.dtype}; supported: {', '.join(FLOAT_DTYPES)}"
            )
    for name, stored in checkpoint.tensors.items():
        known = name in wanted or DERIVED.fullmatch(name) or (tied and name == "lm_head.weight")
        # Left out in silence, a bias or an adapter would make a model that runs and is wrong.
        if not known:
            raise InvalidCheckpoint(f"{stored.file}: tensor {name} has no place in the architecture of config.json")


def _fill(decoder: Decoder, stored: list[StoredTensor], report: Progress) -> None:
    targets = {target.name: target for target in decoder.targets()}
    total, done = sum(tensor.num_bytes for tensor in stored), 0
    report(done, total)
    in_file_order = sorted(stored, key=lambda tensor: (tensor.file, tensor.begin))
    for file, tensors in itertools.groupby(in_file_order, key=lambda tensor: tensor.file):
        try:
            with safe_open(file, framework="pt") as shard:
                for tensor in tensors:
                    targets[tensor.name].fill(shard.get_tensor(tensor.name))
                    done += tensor.num_bytes
                    report(done, total)
        except (SafetensorError, OSError) as error:
            raise InvalidCheckpoint(f"cannot read {file}: {error}") from error


def _dummy(decoder: Decoder, dtype: torch.dtype, report: Progress) -> Decoder:
    """Fill with values of the scale that training would start from: activations neither vanish nor explode."""
    targets = list(decoder.targets())
    total, done = sum(math.prod(target.shape) for target in targets), 0
    for target in targets:
        report(done, total)
        values = torch.empty(target.shape, dtype=dtype)
        if values.dim() > 1:
            values.normal_(std=values.shape[-1] ** -0.5, generator=torch.Generator().manual_seed(DUMMY_SEED + done))
        else:
            values.fill_(0.0 if target.name.endswith(".bias") else 1.0)
        target.fill(values)
        done += values.numel()
    report(done, total)
    return decoder
