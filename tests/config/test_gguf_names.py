"""Choose one of several GGUF files by llama.cpp's rules, on names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.config.gguf_names import choose_file, choose_tower, split_place, split_tag, with_parts
from tokenmill.config.model_files import check_model, check_tokenizer, has_only_gguf, is_hub_id
from tokenmill.core.errors import InvalidCheckpoint

NAMES = [
    "README.md",
    "imatrix_unsloth.gguf",
    "mmproj-F16.gguf",
    "model-IQ4_XS.gguf",
    "model-Q4_K_M.gguf",
    "model-Q8_0.gguf",
    "model-UD-Q6_K.gguf",
    "BF16/model-BF16-00001-of-00002.gguf",
    "BF16/model-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("tag", "want"),
    [
        (None, "model-Q4_K_M.gguf"),
        ("q8_0", "model-Q8_0.gguf"),
        ("Q6_K", "model-UD-Q6_K.gguf"),
        ("UD-Q6_K", "model-UD-Q6_K.gguf"),
        ("bf16", "BF16/model-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_tag_means_the_first_file_whose_name_has_it(tag: str | None, want: str) -> None:
    assert choose_file(NAMES, tag, "here") == want


def test_without_a_tag_q8_0_comes_second_and_then_the_first() -> None:
    assert choose_file(["b-Q8_0.gguf", "a-Q2_K.gguf"], None, "here") == "b-Q8_0.gguf"
    assert choose_file(["b-Q3_K.gguf", "a-Q2_K.gguf"], None, "here") == "a-Q2_K.gguf"


def test_a_tag_without_a_file_lists_the_files() -> None:
    with pytest.raises(InvalidCheckpoint, match="here has no GGUF file for 'Q2_K'; it has: BF16/model-BF16-00001-of-"):
        choose_file(NAMES, "Q2_K", "here")
    with pytest.raises(InvalidCheckpoint, match="here has no GGUF file of a language model"):
        choose_file(["mmproj-F16.gguf"], None, "here")


def test_parts_come_together() -> None:
    first = "BF16/model-BF16-00001-of-00002.gguf"
    assert with_parts(first, NAMES) == [first, "BF16/model-BF16-00002-of-00002.gguf"]
    assert with_parts("model-Q8_0.gguf", NAMES) == ["model-Q8_0.gguf"]
    place = split_place("model-BF16-00001-of-00002.gguf")
    assert place is not None
    assert place.part(2) == "model-BF16-00002-of-00002.gguf"


def test_a_tag_follows_the_last_colon() -> None:
    assert split_tag("owner/name:Q4_K_M") == ("owner/name", "Q4_K_M")
    assert split_tag("owner/name") == ("owner/name", None)
    assert split_tag("name:x") == ("name:x", None)
    assert is_hub_id("owner/name:Q4_K_M")
    assert not is_hub_id("owner/name:Q4/K")


def test_a_folder_of_gguf_files_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model-Q8_0.gguf").touch()
    assert has_only_gguf(tmp_path)
    check_model(str(tmp_path))
    check_model(f"{tmp_path}:Q8_0")
    check_tokenizer(str(tmp_path), None)
    (tmp_path / "config.json").touch()
    (tmp_path / "model.gguf").touch()
    assert not has_only_gguf(tmp_path), "this is one that was made of a file"


def test_only_drawn_weights_need_no_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(InvalidCheckpoint, match="no weights"):
        check_model(str(tmp_path))
    check_model(str(tmp_path), needs_weights=False)


def test_a_tower_is_the_nearest_with_the_most_similar_bits() -> None:
    names = ["m-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf", "mmproj-BF16.gguf", "README.md"]
    assert choose_tower(names, "m-Q4_K_M.gguf") == "mmproj-Q8_0.gguf"
    assert choose_tower(names, "m-BF16.gguf") == "mmproj-BF16.gguf"
    assert choose_tower(["m.gguf", "m.mmproj-f16.gguf"], "m.gguf") == "m.mmproj-f16.gguf"
    deep = ["a/b/m-Q4_0.gguf", "mmproj-Q4_0.gguf", "a/mmproj-F32.gguf", "a/c/mmproj-Q4_0.gguf"]
    assert choose_tower(deep, "a/b/m-Q4_0.gguf") == "a/mmproj-F32.gguf"
    assert choose_tower(["m.gguf", "a/mmproj-F16.gguf", "mmproj.json"], "m.gguf") is None
