"""Headers of GGUF files: all types of metadata against the gguf package, broken files, and files in parts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.gguf import header
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.header import read_header


def write(path: Path, **split: int) -> None:
    writer = GGUFWriter(path, "llama", **split)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "ein Käse\n")
    writer.add_array("strings", ["", "a", "▁ö", "x" * 300])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.25])
    writer.add_array("flags", [True, False])
    writer.add_key_value("bytes", [0, 255], GGUFValueType.ARRAY, GGUFValueType.UINT8)
    for number in range(3):
        writer.add_tensor(f"tensor{number}", np.arange(64 * (number + 1), dtype=np.float32).reshape(-1, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parts(folder: Path) -> list[Path]:
    write(folder / "some.gguf", split_max_tensors=1)
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("is_native", [True, False])
def test_metadata_and_tensors_are_those_of_the_gguf_package(
    is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(header, "native_module", lambda: None)
    path = tmp_path / "some.gguf"
    write(path)
    file, oracle = open_gguf(path), GGUFReader(path)
    own = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert dict(file.metadata) == own
    assert file.metadata.num_items("strings") == 4
    assert file.metadata.num_items("text") == file.metadata.num_items("absent") == 0
    places = [(t.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in oracle.tensors]
    assert [(t.name, t.shape, t.begin, t.num_bytes) for t in file.tensors.values()] == places


def test_strings_that_are_no_text_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.gguf"
    write(path)
    path.write_bytes(path.read_bytes().replace("▁ö".encode(), b"\xe2\x96\xff\xc3a"))
    native = read_header(path).metadata["strings"]
    monkeypatch.setattr(header, "native_module", lambda: None)
    assert read_header(path).metadata["strings"] == native == ["", "a", "\ufffd\ufffd\ufffda", "x" * 300]


def test_a_file_that_ends_anywhere_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    write(path)
    whole = path.read_bytes()
    for size in {*range(0, len(whole) - 1, 13), len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidCheckpoint, match=r"cannot read .*some\.gguf as GGUF: ") as raised:
            read_header(path)
        assert "\n" not in str(raised.value)


def test_a_file_with_any_broken_byte_is_read_or_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "some.gguf"
    write(path)
    whole = path.read_bytes()
    for _ in range(300):
        broken = bytearray(whole)
        for place in rng.integers(min(len(whole), 1200), size=2):
            broken[place] = rng.integers(256)
        path.write_bytes(broken)
        with contextlib.suppress(InvalidCheckpoint):
            dict(read_header(path).metadata)


def test_parts_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    write(tmp_path / "whole.gguf")
    whole, split = open_gguf(tmp_path / "whole.gguf"), open_gguf(parts(tmp_path / "parts")[0])
    assert split.tensors.keys() == whole.tensors.keys()
    for name, tensor in split.tensors.items():
        assert tensor.shape == whole.tensors[name].shape
        assert tensor.data().tobytes() == whole.tensors[name].data().tobytes()


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_part_is_named(missing: int, tmp_path: Path) -> None:
    files = parts(tmp_path)
    files[missing].unlink()
    with pytest.raises(InvalidCheckpoint, match=rf"is split in 3 parts, of which {files[missing].name} is missing"):
        open_gguf(files[0])


def test_a_later_part_says_which_is_the_first(tmp_path: Path) -> None:
    files = parts(tmp_path)
    with pytest.raises(InvalidCheckpoint, match=rf"is part 2 of a split file; give part 1: {files[0].name}"):
        open_gguf(files[1])


def test_parts_that_changed_places_are_refused(tmp_path: Path) -> None:
    files = parts(tmp_path)
    second = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    files[2].write_bytes(second)
    with pytest.raises(InvalidCheckpoint, match="says that it is part 3 of 3, its name part 2 of 3"):
        open_gguf(files[0])


def test_a_link_in_a_cache_of_digests_leads_to_all_parts(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(parts(tmp_path)):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(f"blobs/{number}")
    (tmp_path / "model.gguf").symlink_to(next(tmp_path.glob("*-00001-of-00003.gguf")).name)
    assert len(open_gguf(tmp_path / "model.gguf").tensors) == 3
