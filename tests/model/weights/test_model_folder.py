"""Models found below a folder, by files alone."""

import pytest

from tokenmill.core.errors import InvalidConfig
from tokenmill.model.weights.model_folder import find_models, found_model


def put(folder, *names):
    for number, name in enumerate(names):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"x" * (number + 1))


def test_checkpoints_and_gguf_files_at_any_depth(tmp_path):
    put(
        tmp_path,
        "a/config.json",
        "a/model.safetensors",
        "a/tokenizer.json",
        "work/b/config.json",
        "work/b/x.safetensors",
    )
    put(
        tmp_path,
        "single.gguf",
        "alone/Alone-Q4_K_M.gguf",
        "both/M-Q4_K_M.gguf",
        "both/M-Q8_0.gguf",
        "odd/x.gguf",
        "odd/y.gguf",
    )
    put(tmp_path, "notes/readme.md", "empty/config.json", ".hidden/config.json", ".hidden/model.safetensors")
    found = {model.name: model for model in find_models(tmp_path)}
    assert list(found) == ["a", "alone", "both:Q4_K_M", "both:Q8_0", "odd/x", "odd/y", "single", "work/b"]
    assert found["a"].path == str(tmp_path / "a") and found["a"].num_bytes == 2
    assert found["alone"].path == str(tmp_path / "alone/Alone-Q4_K_M.gguf")


def test_parts_count_once_and_towers_are_no_models(tmp_path):
    put(tmp_path, "big/B-Q4_K_M-00001-of-00002.gguf", "big/B-Q4_K_M-00002-of-00002.gguf", "big/mmproj-F16.gguf")
    (model,) = find_models(tmp_path)
    assert (model.name, model.num_bytes) == ("big", 1 + 2 + 3)
    assert model.path.endswith("00001-of-00002.gguf")


def test_the_hubs_cache_has_ids(tmp_path):
    hub = "models--owner--name"
    put(tmp_path, f"{hub}/blobs/one", f"{hub}/snapshots/abc/config.json", f"{hub}/snapshots/abc/model.safetensors")
    put(tmp_path, f"{hub}/snapshots/old/config.json", f"{hub}/snapshots/old/model.safetensors")
    (tmp_path / hub / "refs").mkdir()
    (tmp_path / hub / "refs/main").write_text("abc")
    put(
        tmp_path,
        "models--q--many/snapshots/1/m-Q4_0.gguf",
        "models--q--many/snapshots/1/m-Q8_0.gguf",
        "models--no--thing/x",
    )
    found = {model.name: model.path for model in find_models(tmp_path)}
    assert list(found) == ["owner/name", "q/many:Q4_0", "q/many:Q8_0"]
    assert found["owner/name"].endswith("snapshots/abc")


def test_a_file_beside_a_folder_of_its_name_keeps_its_suffix(tmp_path):
    put(tmp_path, "m.gguf", "m/config.json", "m/model.safetensors")
    assert {model.name for model in find_models(tmp_path)} == {"m", "m.gguf"}


def test_a_folder_that_is_a_model_itself_is_one(tmp_path):
    put(tmp_path, "m/config.json", "m/model.safetensors")
    assert [model.name for model in find_models(tmp_path / "m")] == ["m"]


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="there is no such folder"):
        find_models(tmp_path / "none")


def test_the_model_of_a_preset_may_be_anything_that_serve_takes(tmp_path):
    put(tmp_path, "m/config.json", "m/model.safetensors", "g.gguf")
    assert found_model("x", str(tmp_path / "m")).num_bytes == 2
    assert found_model("x", str(tmp_path / "g.gguf")).name == "x"
    assert found_model("x", "owner/name").path == "owner/name"
