"""Streams a checkpoint into a decoder, weight by weight, so that the peak of memory is close to the model's size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import InvalidCheckpoint
from tokenmill.kernels.protocol import Kernels
from tokenmill.kernels.torch_kernels import TorchKernels
from tokenmill.models.architecture import Architecture
from tokenmill.models.decoder import Decoder
from tokenmill.weights.checkpoint import open_checkpoint
from tokenmill.weights.reads import Read, plan_reads
from tokenmill.weights.safetensors_header import StoredTensor

Progress = Callable[[int, int], None]

DUMMY_SEED = 0


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
        progress: called with (bytes done, bytes in all) of the checkpoint, once before and after each weight.

    Raises:
        InvalidCheckpoint: anything missing, truncated, misshapen or surplus; found before memory is taken.
    """
    report = progress or (lambda done, total: None)
    if load_format == "dummy":
        return _dummy(Decoder(architecture, kernels), kernels.dtype, report)
    shapes = Decoder(architecture, TorchKernels(kernels.dtype, "meta"))
    reads = plan_reads(open_checkpoint(folder), shapes.targets(), architecture.tie_embeddings)
    decoder = Decoder(architecture, kernels)
    _fill(decoder, reads, report)
    return decoder


def _fill(decoder: Decoder, reads: Sequence[Read], report: Progress) -> None:
    targets = {target.name: target for target in decoder.targets()}
    total, done = sum(read.num_bytes for read in reads), 0
    report(done, total)
    for read in reads:
        parts = {suffix: _tensor(stored) for suffix, stored in read.stored.items()}
        targets[read.name].fill(read.form.read(parts))
        done += read.num_bytes
        report(done, total)


def _tensor(stored: StoredTensor) -> torch.Tensor:
    """The tensor, mapped from its file; what has been read of it leaves memory with it.

    The file is opened for each tensor: a mapping that stayed would keep all its pages in memory.
    """
    try:
        with safe_open(stored.file, framework="pt") as file:
            return file.get_tensor(stored.name)
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(f"cannot read {stored.file}: {error}") from error


def _dummy(decoder: Decoder, dtype: torch.dtype, report: Progress) -> Decoder:
    """Fill with values of the scale that training would start from: activations neither vanish nor explode."""
    targets = list(decoder.targets())
    total, done = sum(math.prod(target.shape) for target in targets), 0
    for target in targets:
        report(done, total)
        values = torch.empty(target.shape, dtype=dtype)
        if target.is_matrix:
            values.normal_(std=values.shape[-1] ** -0.5, generator=torch.Generator().manual_seed(DUMMY_SEED + done))
        else:
            values.fill_(0.0 if target.name.endswith(".bias") else 1.0)
        target.fill(values)
        done += values.numel()
    report(done, total)
    return decoder
