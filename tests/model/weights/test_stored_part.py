"""Stored numbers as arrays and as tensors of the same bytes, and tensors mapped from their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.stored_tensors import floats, stored, tensor_of
from tokenmill.model.quantization.stored_array import TYPES, StoredArray
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.safetensors_header import read_header
from tokenmill.model.weights.stored_part import read_mapped, read_part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_numbers_of_16_bits_are_those_of_torch(dtype: torch.dtype) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    found = stored(numbers)
    assert tensor_of(found).data_ptr() == numbers.data_ptr() and tensor_of(found).dtype == dtype
    assert np.array_equal(found.float32(), numbers.float().numpy(), equal_nan=True)


def test_other_floats_become_those_of_32_bits() -> None:
    numbers = torch.randn(3, 4, dtype=torch.float64)
    assert stored(numbers).dtype == "F32" and torch.equal(floats(stored(numbers)), numbers.float())


def test_numbers_at_odd_addresses_are_copied() -> None:
    data = np.arange(9, dtype=np.uint8)
    odd, even = StoredArray.of_bytes(data[1:], "F32", (2,)), StoredArray.of_bytes(data[:8], "F32", (2,))
    assert odd.values.tobytes() == data[1:].tobytes() and odd.values.flags.aligned
    assert np.shares_memory(even.values, data) or data.ctypes.data % 4


def test_tensors_of_every_type_are_mapped_and_read(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "some.safetensors"
    drawn = {name: rng.integers(0, 2, (6, 5)).astype(kind) for name, kind in TYPES.items() if name != "BF16"}
    numbers = torch.randn(6, 5).bfloat16()
    save_file({name: torch.from_numpy(values) for name, values in drawn.items()} | {"BF16": numbers}, path)
    header = read_header(path)
    for name, values in {**drawn, "BF16": stored(numbers).values}.items():
        assert header[name].dtype == name
        for found in (read_mapped(header[name]), read_part(header[name], None, Part.whole(6))):
            assert found.dtype == name and np.array_equal(found.values, values)


def test_what_is_written_to_mapped_numbers_stays_out_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"x": torch.ones(4)}, path)
    found = tensor_of(read_mapped(read_header(path)["x"]))
    found.zero_()
    assert read_mapped(read_header(path)["x"]).values.tolist() == [1, 1, 1, 1]


def test_a_file_that_was_cut_since_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"x": torch.ones(4)}, path)
    place = read_header(path)["x"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*some\.safetensors"):
        read_mapped(place)
