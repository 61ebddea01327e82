"""Refuse what cannot work before the weights are read, in one sentence that names it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import default_sampling
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig, TokenMillError
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.safetensors_header import read_header
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.machine.device import THREADS_PER_CORE

CORES = os.cpu_count() or 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "m")


def refusal(folder: Path, **flags: object) -> TokenMillError:
    """Return why a start is refused; nothing must have been read by then."""
    phases: list[str] = []
    config = EngineConfig(model=str(folder), device="cpu", num_pages=64, **flags).resolve()  # type: ignore[arg-type]
    with pytest.raises((InvalidConfig, InvalidCheckpoint)) as error:
        build_engine(config, lambda phase, *_: phases.append(phase))
    assert "loading weights" not in phases
    assert error.value.exit_code == 2
    return error.value


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"num_threads": 100_000}, f"--num-threads 100000 is too many for this machine.*{THREADS_PER_CORE * CORES} at"),
        ({"num_threads": THREADS_PER_CORE * CORES + 1}, "--num-threads .* is too many"),
        (
            {"attention_backend": "nonsense"},
            "--attention-backend nonsense is unknown on cpu; choose auto, one of",
        ),
        ({"attention_backend": "native", "dtype": "float32"}, "--attention-backend native: the native attention is"),
        ({"attention_backend": "cpu", "kv_cache_dtype": "int8"}, "--kv-cache-dtype needs the native attention"),
        ({"max_model_len": 10**9}, "--max-model-len 1000000000 exceeds the model's context of 512 tokens"),
        ({"step_log": "/no/such/folder/log"}, "--step-log /no/such/folder/log: No such file or directory"),
        ({"step_log": "/"}, "--step-log /: Is a directory"),
    ],
)
def test_a_flag_that_cannot_work(folder: Path, flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        raise refusal(folder, **flags)


def test_a_step_log_that_is_there_is_not_emptied_by_a_start_that_fails(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("records")
    refusal(folder, step_log=str(log), max_model_len=10**9)
    assert log.read_text() == "records"


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("num_hidden_layers", 10_000_000, 1024),
        ("vocab_size", 10**15, 2**31 - 1),
        ("hidden_size", 10**30, 2**31 - 1),
        ("max_position_embeddings", 10**13, 2**31 - 1),
        ("num_experts", 10_000_000, 4096),
    ],
)
def test_a_config_with_absurd_sizes(tmp_path: Path, field: str, value: int, most: int) -> None:
    folder = make_checkpoint(tmp_path / "m", "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(InvalidCheckpoint, match=f"config.json: {field} must be at most {most}, got {value}"):
        read_architecture(folder)


def test_a_context_that_takes_more_memory_than_there_is(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2**31 - 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert "of memory and" in str(refusal(folder))


@pytest.mark.timeout(60)
def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    for name in ("model.safetensors", "generation_config.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    os.mkfifo(tmp_path / "model.gguf")
    for read, path in (
        (read_header, folder / "model.safetensors"),
        (default_sampling, folder),
        (read_architecture, folder),
        (open_gguf, tmp_path / "model.gguf"),
        (read_header, Path("/dev/zero")),
    ):
        with pytest.raises(InvalidCheckpoint, match="it is not a regular file"):
            read(path)  # type: ignore[operator]
