"""The bits of int4's matrices are measured once for a model and a budget, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.machine_sizes import Machine
from tokenmill.config.configs import EngineConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.kernels.native import load_kernels
from tokenmill.startup.assembly.mixing import SUFFIX
from tokenmill.startup.assembly.setup import build_engine

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
CHOOSING, MEASURING = "choosing bits for int4", "measuring inputs for int4"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", hidden_size=64, intermediate_size=128)


def start(model: Path, **options: Any) -> tuple[EngineReady, set[str]]:
    """Start and end an engine; return its description and the names of its start's phases."""
    phases: set[str] = set()
    flags = {
        "device": "cpu",
        "quantization": "int4",
        "max_num_seqs": 2,
        "weight_cache_dir": str(model.parent / "cache"),
    }
    config = EngineConfig(model=str(model), **{**flags, **options}).resolve()
    built = build_engine(config, lambda phase, *_: phases.add(phase), Machine(1 << 30))
    built.engine.close()
    return built.ready, phases


def test_bits_are_chosen_once_for_a_budget(model: Path) -> None:
    first, phases = start(model)
    assert {CHOOSING, MEASURING} <= phases
    assert "; bits a weight: vocabulary " in first.weights_source
    again, phases = start(model)
    assert not {CHOOSING, MEASURING} & phases
    assert again.weight_bytes == first.weight_bytes
    assert again.weights_source.split("; ")[1] == first.weights_source.split("; ")[1]
    larger, phases = start(model, quantization_bits=8.5)
    assert CHOOSING in phases
    assert larger.weight_bytes > first.weight_bytes


def test_errors_of_int8_weigh_what_is_measured_once(model: Path) -> None:
    _, phases = start(model, quantization="int8")
    assert "measuring inputs for int8" in phases
    assert CHOOSING not in phases
    _, phases = start(model, quantization="int8")
    assert "measuring inputs for int8" not in phases


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"vocabulary": 1, "layers": []}', b'{"vocabulary": 7, "layers": []}'])
def test_a_damaged_choice_is_made_anew(model: Path, damage: bytes) -> None:
    first, _ = start(model)
    (kept,) = (model.parent / "cache").glob(f"*{SUFFIX}")
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    again, phases = start(model)
    assert CHOOSING in phases
    assert again.weight_bytes == first.weight_bytes
    assert kept.read_bytes() == whole


def test_without_a_cache_nothing_is_kept(model: Path) -> None:
    for _ in range(2):
        _, phases = start(model, weight_cache=False)
        assert CHOOSING in phases
    assert not (model.parent / "cache").exists()


def test_a_model_without_a_tokenizer_gets_bits_that_nothing_measured(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", tokenizer=False, hidden_size=64, intermediate_size=128)
    ready, phases = start(model)
    assert not {CHOOSING, MEASURING} & phases
    assert "; bits a weight: vocabulary " in ready.weights_source


@pytest.mark.parametrize("bits", [4.4, 9.0, float("nan")])
def test_a_budget_that_no_formats_have_is_refused(model: Path, bits: float) -> None:
    with pytest.raises(InvalidConfig, match="quantization-bits"):
        start(model, quantization_bits=bits)
