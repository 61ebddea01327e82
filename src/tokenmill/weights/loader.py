"""Streams a checkpoint into a decoder, weight by weight, so that the peak of memory is close to the model's size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from tokenmill.errors import InvalidCheckpoint
from tokenmill.kernels.protocol import Kernels
from tokenmill.kernels.quantized import Rows
from tokenmill.kernels.torch_kernels import TorchKernels
from tokenmill.models.architecture import Architecture
from tokenmill.models.decoder import Decoder
from tokenmill.weights.checkpoint import open_checkpoint
from tokenmill.weights.gguf.file import open_gguf
from tokenmill.weights.gguf.folder import LINK_NAME
from tokenmill.weights.gguf.reads import plan_gguf_reads
from tokenmill.weights.reads import plan_reads

Progress = Callable[[int, int], None]

DUMMY_SEED = 0


class WeightRead(Protocol):
    """One weight to be read: the name of its target, its bytes in the files, and its values."""

    @property
    def name(self) -> str:
        """The target's name."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""

    def rows(self) -> Rows:
        """The values, floats or quantized."""


def load_model(
    folder: Path,
    architecture: Architecture,
    kernels: Kernels,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> Decoder:
    """A decoder with the weights of a folder, in the form of the kernels.

    Args:
        load_format: `auto`, `safetensors` or `gguf`: read the folder; `dummy`: seeded random weights, no weight file
            needed.
        progress: called with (bytes done, bytes in all) of the checkpoint, once before and after each weight.

    Raises:
        InvalidCheckpoint: anything missing, truncated, misshapen or surplus; found before memory is taken.
    """
    report = progress or (lambda done, total: None)
    if load_format == "dummy":
        return _dummy(Decoder(architecture, kernels), kernels.vector(0), report)
    reads = _plan(folder, load_format, Decoder(architecture, TorchKernels(kernels.dtype, "meta")))
    decoder = Decoder(architecture, kernels)
    _fill(decoder, reads, report)
    return decoder


def _plan(folder: Path, load_format: str, shapes: Decoder) -> Sequence[WeightRead]:
    architecture = shapes.architecture
    is_gguf = (folder / LINK_NAME).exists()
    if load_format not in ("auto", "gguf" if is_gguf else "safetensors"):
        raise InvalidCheckpoint(f"{folder} has no {load_format} weights, which --load-format asks for")
    if is_gguf:
        return plan_gguf_reads(open_gguf(folder / LINK_NAME), shapes.targets(), architecture)
    return plan_reads(open_checkpoint(folder), shapes.targets(), architecture.tie_embeddings)


def _fill(decoder: Decoder, reads: Sequence[WeightRead], report: Progress) -> None:
    targets = {target.name: target for target in decoder.targets()}
    total, done = sum(read.num_bytes for read in reads), 0
    report(done, total)
    for read in reads:
        targets[read.name].fill(read.rows())
        done += read.num_bytes
        report(done, total)


def _dummy(decoder: Decoder, like: torch.Tensor, report: Progress) -> Decoder:
    """Fill with values of the scale that training would start from: activations neither vanish nor explode.

    Args:
        like: has the dtype of the values, and the device that draws them.
    """
    targets = list(decoder.targets())
    total, done = sum(math.prod(target.shape) for target in targets), 0
    for target in targets:
        report(done, total)
        values = like.new_empty(target.shape)
        if target.is_matrix:
            generator = torch.Generator(like.device).manual_seed(DUMMY_SEED + done)
            values.normal_(std=values.shape[-1] ** -0.5, generator=generator)
        else:
            values.fill_(0.0 if target.name.endswith(".bias") else 1.0)
        target.fill(values)
        done += values.numel()
    report(done, total)
    return decoder
