"""The fingerprint of a model: equal copies share it, whatever is different does not."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tokenmill.model.weights.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(random.randbytes(1 << 20))
    return model


def test_a_copy_has_the_same_fingerprint_and_other_files_do_not_matter(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("another")
    assert fingerprint(folder, "bfloat16") == fingerprint(copy, "bfloat16")


def test_other_weights_forms_and_configs_have_others(folder: Path, tmp_path: Path) -> None:
    found = {fingerprint(folder, "bfloat16", "none"), fingerprint(folder, "bfloat16", "int8"), fingerprint(folder)}
    # A fine-tuned copy: the same sizes and names, other weights throughout.
    tuned = shutil.copytree(folder, tmp_path / "tuned")
    (tuned / "model.safetensors").write_bytes(random.randbytes(1 << 20))
    longer = shutil.copytree(folder, tmp_path / "longer")
    (longer / "config.json").write_text('{"rope_theta": 1}')
    found |= {fingerprint(tuned), fingerprint(longer)}
    assert len(found) == 5


def test_a_single_file_has_one(folder: Path) -> None:
    assert fingerprint(folder / "model.safetensors") != fingerprint(folder)
