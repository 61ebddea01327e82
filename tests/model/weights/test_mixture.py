"""The choice of bits: within its budget, where they save most, and from the errors of the weights themselves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.kernels.stored_tensors import stored, tensor_of
from tokenmill.model.quantization.packed import QUANTIZATIONS, PackedFormat, PackedFormats
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import WeightRead, plan_model
from tokenmill.model.weights.mixture import BITS, Group, can_mix, choose, measured_formats, summary, typical_formats

native = load_kernels(1)
needs_native = pytest.mark.skipif(native is None, reason="the native kernels are not built here")
INT8 = PackedFormats(PackedFormat.INT8, PackedFormat.INT8)


Losses = dict[Group, dict[PackedFormat, float]]


def drawn(rng: np.random.Generator, num_layers: int = 6) -> tuple[dict[Group, int], Losses]:
    """Sizes and losses of groups; of each a loss that falls with its bits."""
    groups = [Group(None, "vocabulary")]
    groups += [Group(layer, field) for layer in range(num_layers) for field in ("layers", "gate_up", "down")]
    sizes = {group: int(rng.integers(1, 50)) * 1088 for group in groups}
    falling = [sorted(rng.exponential(size=len(BITS)), reverse=True) for _ in groups]
    losses = {group: dict(zip(BITS, own, strict=True)) for group, own in zip(groups, falling, strict=True)}
    return sizes, losses


def by_group(formats: PackedFormats) -> dict[Group, PackedFormat]:
    found = {Group(None, "vocabulary"): formats.vocabulary}
    for layer, own in enumerate(formats.by_layer):
        assert own.gate_up is not None and own.down is not None
        found |= {
            Group(layer, "layers"): own.layers,
            Group(layer, "gate_up"): own.gate_up,
            Group(layer, "down"): own.down,
        }
    return found


def mean_bits(sizes: dict[Group, int], formats: PackedFormats) -> float:
    chosen = by_group(formats)
    return sum(size * BITS[chosen[group]] for group, size in sizes.items()) / sum(sizes.values())


def test_bits_stay_within_the_budget_and_leave_no_room_for_a_step(rng: np.random.Generator) -> None:
    for _ in range(50):
        sizes, losses = drawn(rng)
        bits = float(rng.uniform(4.5, 8.5))
        formats = choose(sizes, losses, bits)
        spent = mean_bits(sizes, formats)
        assert spent <= bits + 1e-9
        left = (bits - spent) * sum(sizes.values())
        for group, format in by_group(formats).items():
            for other, wanted in BITS.items():
                saves = group.layer is not None and losses[group][other] < losses[group][format]
                assert not saves or wanted <= BITS[format] or sizes[group] * (wanted - BITS[format]) > left - 1e-6


def test_a_vocabulary_of_half_a_model_gets_its_bits_before_they_are_spent_elsewhere() -> None:
    """Step by step, layers would take what it needs: theirs are smaller, and each saves a little more by the byte."""
    sizes = {Group(None, "vocabulary"): 1000} | {Group(0, field): 300 for field in ("layers", "gate_up", "down")}
    falling = {PackedFormat.INT4: 4.0, PackedFormat.INT4_OFFSET: 3.0, PackedFormat.INT5: 1.0, PackedFormat.INT8: 0.0}
    tripled = {format: 3 * loss for format, loss in falling.items()}
    losses = {group: tripled if group.layer is None else falling for group in sizes}
    formats = choose(sizes, losses, 7.9)
    assert formats.vocabulary is PackedFormat.INT8
    assert mean_bits(sizes, formats) <= 7.9


def test_bits_go_where_a_byte_saves_most() -> None:
    sizes = {Group(None, "vocabulary"): 100, Group(0, "layers"): 100, Group(0, "gate_up"): 100, Group(0, "down"): 100}
    falling = {PackedFormat.INT4: 4.0, PackedFormat.INT4_OFFSET: 3.0, PackedFormat.INT5: 1.0, PackedFormat.INT8: 0.0}
    losses = dict.fromkeys(sizes, falling)
    losses[Group(0, "down")] = {format: 100 * loss for format, loss in falling.items()}
    chosen = by_group(choose(sizes, losses, 5.75))
    assert chosen.pop(Group(0, "down")) is PackedFormat.INT8
    assert PackedFormat.INT8 not in chosen.values()
    assert set(by_group(choose(sizes, losses, 4.5)).values()) == {PackedFormat.INT4}
    assert set(by_group(choose(sizes, losses, 8.5)).values()) == {PackedFormat.INT8}


@needs_native
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_takes_the_bytes_of_its_budget(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path, family, hidden_size=64, intermediate_size=128)
    architecture, kernels = read_architecture(folder), NativeKernels(native, INT8)
    plan = plan_model(folder, architecture, kernels)
    most = plan.weight_bytes
    for bits in (4.5, 5.5, 6.2):
        seen: list[tuple[int, int]] = []
        measured = measured_formats(plan, kernels, {}, bits, lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1]
        for formats in (measured, typical_formats(architecture, kernels, bits)):
            assert len(formats.by_layer) == len(architecture.layers)
            own = plan_model(folder, architecture, kernels.with_formats(formats))
            assert own.weight_bytes < most and own.load().argmax(torch.zeros(1, 64).bfloat16()) is not None
            assert summary(formats).startswith("bits a weight: vocabulary ")
    assert summary(QUANTIZATIONS["int4"]) == ""


@needs_native
def test_a_layer_that_bits_change_nothing_in_gets_the_fewest(tmp_path: Path) -> None:
    """Weights of few values are kept by four bits; more would save nothing."""
    folder = make_checkpoint(tmp_path, "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    kernels = NativeKernels(native, INT8)
    plan = plan_model(folder, read_architecture(folder), kernels)

    class Even:
        """A read of a matrix, or of one on the grid of four bits if it is in layer 0."""

        def __init__(self, read: WeightRead) -> None:
            self.read, self.key, self.num_bytes = read, read.key, read.num_bytes

        def rows(self) -> StoredArray:
            rows = self.read.rows()
            return stored(torch.sign(tensor_of(rows))) if self.key.layer == 0 and len(rows.shape) == 2 else rows

    msgspec.structs.force_setattr(plan, "reads", [Even(read) for read in plan.reads or ()])
    first, second = measured_formats(plan, kernels, {}, 7.8, lambda done, total: None).by_layer
    assert {first.layers, first.gate_up, first.down} <= {PackedFormat.INT4, PackedFormat.INT4_OFFSET}
    assert PackedFormat.INT8 in {second.layers, second.gate_up, second.down}


def test_experts_and_recurrences_keep_formats_of_their_own(tmp_path: Path) -> None:
    for family, wanted in (("llama", True), ("qwen3_moe", False)):
        assert can_mix(read_architecture(make_checkpoint(tmp_path / family, family))) is wanted
