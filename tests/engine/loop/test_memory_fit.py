"""A model that is too large is refused before its weights are read, with numbers and with flags that help."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.machine_sizes import Machine, make_six_mib
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import OutOfMemory
from tokenmill.core.sizes import size_text
from tokenmill.model.attention.tensor_kv import HeadMajorKV
from tokenmill.model.kernels.measuring import MeasuringKernels
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.quantization.packed import QUANTIZATIONS
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import ModelPlan, plan_model
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.machine.device import within_budget
from tokenmill.startup.machine.device_memory import workspace_bytes
from tokenmill.startup.sizing.fit import check_fit, check_parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_six_mib(tmp_path_factory.mktemp("models") / "m")


def config_of(folder: Path, **flags: object) -> EngineConfig:
    # A mapped file is not memory that the machine of the test counts.
    flags = {"weight_cache": False, **flags}
    return EngineConfig(model=str(folder), device="cpu", max_num_seqs=2, **flags).resolve()  # type: ignore[arg-type]


def plan_of(folder: Path, quantization: str = "none") -> ModelPlan:
    architecture = read_architecture(folder)
    formats = QUANTIZATIONS.get(quantization)
    kernels, _ = select_kernels("auto", "cpu", "bfloat16", 1, *([formats] if formats else []))
    return plan_model(
        folder, architecture, within_budget(config_of(folder, quantization=quantization), kernels, architecture)
    )


def page_bytes(folder: Path) -> int:
    config = config_of(folder)
    return HeadMajorKV.bytes_per_page(plan_of(folder).shapes.attention_spec, config.page_size, config.dtype)


def build(folder: Path, free: int, **flags: object) -> list[str]:
    """Phases of a start on a machine with so much free memory."""
    phases: list[str] = []
    built = build_engine(config_of(folder, **flags), lambda phase, *_: phases.append(phase), Machine(free))
    built.engine.close()
    return phases


def refusal(folder: Path, free: int, **flags: object) -> str:
    phases: list[str] = []
    with pytest.raises(OutOfMemory) as error:
        build_engine(config_of(folder, **flags), lambda phase, *_: phases.append(phase), Machine(free))
    assert error.value.exit_code == 2
    assert "loading weights" not in phases, "nothing has been read"
    return str(error.value)


def flags_of(advice: str) -> dict[str, object]:
    """The flags that a piece of advice names, as fields of the config."""
    found = re.findall(r"--([a-z-]+) (\w+)", advice)
    return {name.replace("-", "_"): int(value) if value.isdigit() else value for name, value in found}


def test_weights_that_do_not_fit_are_told_in_numbers_with_what_would(folder: Path) -> None:
    weights, int8, int4 = (plan_of(folder, form).weight_bytes for form in ("none", "int8", "int4"))
    least = 6 * page_bytes(folder) * 5 // 2  # 64 tokens and the page for padding, of which a share of 0.4 is taken
    sentence = refusal(folder, int8 + 2 * least)
    assert f"needs {size_text(weights + 5 * page_bytes(folder) * 2.5)} of memory and" in sentence
    assert f"{size_text(int8 + 2 * least)} are free: its weights take {size_text(weights)}, its KV cache" in sentence
    advice = sentence.split("what fits: ")[1].split(", or ")
    assert [piece.split(" (")[0] for piece in advice] == ["--quantization int8", "--quantization int4"]
    assert f"({size_text(int4)} of weights)" in advice[1]
    for piece in advice:
        build(folder, int8 + 2 * least, **flags_of(piece))
    assert "what fits: --quantization int4 (" in refusal(folder, int4 + least)
    small = refusal(folder, int4 + 20 * page_bytes(folder), max_model_len=512).split("what fits: ")[1]
    assert small.startswith("--quantization int4 (")
    assert ") with --max-model-len " in small
    build(folder, int4 + 20 * page_bytes(folder), **flags_of(small))
    assert refusal(folder, int4 // 2).endswith("no --quantization makes it fit, take a smaller one")


@pytest.mark.parametrize(
    "flags", [{"max_model_len": 512}, {"num_pages": 10_000}, {"kv_cache_memory_bytes": 1 << 30}, {"num_pages": 10**12}]
)
def test_a_kv_cache_that_does_not_fit_is_refused_with_a_size_that_does(folder: Path, flags: dict[str, int]) -> None:
    free = plan_of(folder).weight_bytes + 40 * page_bytes(folder)
    advice = refusal(folder, free, **flags).split("what fits: ")[1].split(", or ")[0]
    smaller = flags_of(advice)
    assert smaller.keys() == flags.keys()
    build(folder, free, **smaller)
    (name, value), *_ = smaller.items()
    assert isinstance(value, int)
    more = value + 2 * (page_bytes(folder) if name == "kv_cache_memory_bytes" else 16)
    assert refusal(folder, free, **{name: more}), "what it names is the most that fits"


@pytest.mark.parametrize("form", ["none", "int8", "int4"])
def test_a_running_engine_tells_what_its_weights_really_take(folder: Path, form: str) -> None:
    built = build_engine(config_of(folder, quantization=form), platform=Machine(1 << 30))
    built.engine.close()
    # Which of int4's matrices have more bits is measured; a budget may be left with a step that has no room.
    off = 0.02 if form == "int4" else 0
    assert built.ready.weight_bytes == pytest.approx(plan_of(folder, form).weight_bytes, rel=off)


def test_sizes_are_readable() -> None:
    assert [size_text(size) for size in (0, 1023, 3 << 20, 1 << 60)] == [
        "0.0 B",
        "1,023.0 B",
        "3.0 MiB",
        "1,048,576.0 TiB",
    ]


def test_the_smaller_type_is_advised_where_the_larger_one_is_asked_for(folder: Path) -> None:
    weights = plan_of(folder).weight_bytes
    sentence = refusal(folder, weights + 100 * page_bytes(folder), dtype="float32")
    assert "what fits: --dtype bfloat16 (" in sentence
    assert "--dtype bfloat16 --quantization int8 (" in sentence


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["torch", "none", "int8", "int4"])
def test_what_is_measured_is_what_is_taken(tmp_path: Path, family: str, form: str) -> None:
    plan = plan_of(make_checkpoint(tmp_path / "m", family), form)
    kernels = TorchKernels("float32", "cpu") if form == "torch" else plan.kernels
    architecture = plan.shapes.architecture
    measured = plan_model(tmp_path / "m", architecture, kernels).weight_bytes
    real = MeasuringKernels(kernels)
    real._kernels = kernels
    tables = Decoder(architecture, real).rotary
    assert measured == real.num_bytes + sum(one.cos.nbytes + one.sin.nbytes for one in tables.values())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ..."),
    ],
)
def test_memory_that_runs_out_later_is_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: object) -> None:
        raise error

    monkeypatch.setattr(ModelPlan, "load", load)
    with pytest.raises(OutOfMemory, match=r"memory ran out while loading weights, 1,024 MiB are free now"):
        build(folder, 1 << 30)


def serve(folder: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stderr


def test_ranks_on_gpus_have_a_memory_each(folder: Path) -> None:
    plan, page, shared = plan_of(folder), page_bytes(folder), Machine(0)
    config, architecture = config_of(folder, tensor_parallel_size=2), plan.shapes.architecture
    step = workspace_bytes(config, architecture, architecture.max_position, 2)
    for free, ranks, is_accelerator, fits in [
        (plan.weight_bytes * 3 // 2, 2, False, False),
        (plan.weight_bytes * 3 // 2 + step, 2, True, True),
        (plan.weight_bytes // 2 + step, 2, True, False),
    ]:
        shared.free, shared.is_accelerator = free, is_accelerator
        with contextlib.nullcontext() if fits else pytest.raises(OutOfMemory):
            check_fit(config_of(folder, tensor_parallel_size=ranks), shared, folder, plan, page, 1)
    shared.free = architecture.num_parameters() // 3  # less than half a byte for each parameter
    check_parameters(config, shared, architecture)
    shared.is_accelerator = False
    with pytest.raises(OutOfMemory, match="billion parameters"):
        check_parameters(config, shared, architecture)


def test_a_terabyte_of_weights_is_refused_at_once(tmp_path: Path) -> None:
    """A whole checkpoint, as far as its headers tell; nobody could read it."""
    folder = make_checkpoint(tmp_path / "m", hidden_size=256, tie_word_embeddings=True)
    start, header = 0, {}
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 1 << 30}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    stored = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    for name, tensor in stored.items():
        if name == "__metadata__":
            continue
        shape = [config["vocab_size"], 256] if name == "model.embed_tokens.weight" else tensor["shape"]
        end = start + 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + start)
    code, output = serve(folder, "--dtype", "float32")
    assert code == 2
    assert "Traceback" not in output
    assert "of memory are free" in output
    assert "loading weights" not in output


def test_tables_beyond_the_address_space_are_a_sentence(folder: Path) -> None:
    code, output = serve(folder, "--max-num-seqs", str(10**12))
    assert code == 2
    assert "Traceback" not in output
    assert "tokenmill: memory ran out while allocating KV" in output
