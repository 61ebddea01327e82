"""config.json that contradicts itself, or says what nobody knows: refused by the name of the field, or harmless."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.models.test_families import GRANITE, LLAMA, QWEN3, SMOLLM3, windows_of
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.models.architecture_config import read_architecture


@pytest.mark.parametrize("config", [LLAMA, GRANITE], ids=["llama", "granite"])
def test_a_family_without_windows_refuses_one_that_would_change_a_text(config: dict[str, Any]) -> None:
    num_layers, longest = config["num_hidden_layers"], read_architecture(config).max_position
    for window in (1, 4096 if longest > 4096 else 512, longest - 1):
        for switch in ({}, {"use_sliding_window": True}, {"use_sliding_window": None}):
            with pytest.raises(InvalidCheckpoint, match=f"sliding_window {window} is not supported"):
                read_architecture({**config, "sliding_window": window, **switch})
    with pytest.raises(InvalidCheckpoint, match="sliding_window must be an integer, got '4096'"):
        read_architecture({**config, "sliding_window": "4096"})
    some = ["full_attention"] * (num_layers - 1) + ["sliding_attention"]
    with pytest.raises(InvalidCheckpoint, match="layer_types has 'sliding_attention'; supported: full_attention"):
        read_architecture({**config, "layer_types": some})
    for harmless in (
        {"sliding_window": None},
        {"sliding_window": longest},
        {"sliding_window": 9, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * num_layers},
    ):
        assert read_architecture({**config, **harmless}) == read_architecture(config)


@pytest.mark.parametrize("change", [{"sliding_window": None}, {}])
def test_layers_that_slide_need_a_window(change: dict[str, Any]) -> None:
    config = {name: value for name, value in SMOLLM3.items() if not name.endswith("sliding_window")}
    sliding = {**config, "layer_types": ["sliding_attention"] * 36, **change}
    with pytest.raises(InvalidCheckpoint, match="layer_types has sliding_attention, and nothing says how long"):
        read_architecture(sliding)
    assert windows_of({**sliding, "sliding_window": 7}) == (7,) * 36


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float64", "float99", "int8", "", 16, ["bfloat16"]])
def test_an_unknown_float_format_is_refused_by_name(field: str, name: object) -> None:
    config = {key: value for key, value in QWEN3.items() if key != "torch_dtype"}
    with pytest.raises(InvalidCheckpoint) as raised:
        read_architecture({**config, field: name})
    assert f"{field} {name!r} is not supported; supported: float32, float16, bfloat16, auto" in str(raised.value)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "auto", None])
def test_known_float_formats_are_read(name: str | None) -> None:
    assert read_architecture({**QWEN3, "torch_dtype": name}).dtype == name


@pytest.mark.parametrize("value", [151936, -1, [151645, 200000]])
def test_an_end_outside_the_vocabulary_is_refused_by_name(value: object) -> None:
    worst = value[-1] if isinstance(value, list) else value
    with pytest.raises(InvalidCheckpoint, match=f"eos_token_id {worst} is not in the vocabulary of 151936 tokens"):
        read_architecture({**QWEN3, "eos_token_id": value})


def test_what_a_family_takes_by_default_need_not_be_in_the_vocabulary() -> None:
    small = {name: value for name, value in SMOLLM3.items() if name != "eos_token_id"}
    assert read_architecture({**small, "vocab_size": 331}).eos_token_ids == ()
