"""The model in every form that the engines read, made once: checkpoint, GGUF, OpenVINO."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.environments import BUILD, HERE, python_of

from tokenmill.demo import demo_model_path

ROOT = HERE.parents[1]
SHAPES = ("qwen3-0.6b", "gemma3-1b")
# Published models of the catalogue.
REAL_MODELS = ("smollm2", "gemma3-270m")
# One of these whose rows are whole blocks of llama.cpp's K types, see `real_model.widened`; and the demo model, whose
# rows are so by themselves, and whose weights were never in few bits.
WIDE = "smollm2-wide"
DEMO = "demo"
JUDGED = (*REAL_MODELS, WIDE, DEMO)
SHAPE_VARIABLE = "TOKENMILL_PEERS_SHAPE"
# Of TokenMill's int4: bits of a weight.
BITS_VARIABLE = "TOKENMILL_PEERS_BITS"


def shape() -> str:
    """Choose the model to compare: `--shape`."""
    return os.environ.get(SHAPE_VARIABLE, SHAPES[0])


def checkpoint() -> Path:
    """The random checkpoint in the Hugging Face layout."""
    target = BUILD / "models" / f"{shape()}-random"
    return _made(target, "", ["-m", "benchmarks.peers.checkpoint", "{target}", shape()])


def gguf(name: str) -> Path:
    """The GGUF file of a format: BF16, Q8_0, Q4_0, Q4_K_M."""
    return _gguf(checkpoint(), f"{shape()}-gguf", name)


def package_name(model: str) -> str:
    """The model of the catalogue that a judged one is made from."""
    return REAL_MODELS[0] if model == WIDE else model


def real(model: str) -> Path:
    """A published model in float32, as GGUF: see `real_model`; the demo model as it is."""
    if model == DEMO:
        return demo_model_path()
    command = ["-m", "benchmarks.peers.real_model", package_name(model), "{target}", *["wide"][: model == WIDE]]
    return _made(BUILD / "models" / f"{model}-reordered", "", command) / "F32.gguf"


def real_gguf(model: str, name: str) -> Path:
    """The same in one of llama.cpp's formats."""
    return _gguf(real(model), f"{model}-reordered-gguf", name)


def _gguf(source: Path, target: str, name: str) -> Path:
    command = ["-m", "benchmarks.peers.gguf_model", str(source), "{target}"]
    return _made(BUILD / "models" / target, "llama-cpp", command) / f"{name}.gguf"


def real_checkpoint(model: str) -> Path:
    """The same in the Hugging Face layout, float32."""
    if model == DEMO:
        return demo_model_path()
    command = ["-m", "benchmarks.peers.checkpoint", "{target}", str(real(model))]
    return _made(BUILD / "models" / f"{model}-reordered-checkpoint", "", command)


def openvino(weights: str) -> Path:
    """The folder of an OpenVINO model: bf16, or int8 or int4 weights."""
    return _openvino(checkpoint(), f"{shape()}-openvino", weights)


def real_openvino(model: str, weights: str) -> Path:
    """The same of a published model."""
    return _openvino(real_checkpoint(model), f"{model}-reordered-openvino", weights)


def _openvino(source: Path, target: str, weights: str) -> Path:
    command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(source)]
    command += ["--task", "text-generation-with-past"]
    # Left to itself, the export keeps the checkpoint's floats.
    command += [] if weights == "bf16" else ["--weight-format", weights]
    # Of 128 inputs by default, which rows of 576 are no multiple of.
    command += ["--group-size", "64"] if weights == "int4" else []
    return _made(BUILD / "models" / f"{target}-{weights}", "openvino", [*command, "{target}"])


def _made(target: Path, environment: str, arguments: list[str]) -> Path:
    """Run a command that fills a folder, unless it has done so before; a torn attempt is not taken for it.

    Raises:
        SystemExit: it failed, with the end of what it wrote.
    """
    if target.exists():
        return target
    print(f"making {target.relative_to(BUILD)}", file=sys.stderr)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    command = [str(python_of(environment)), *(argument.replace("{target}", str(partial)) for argument in arguments)]
    log = BUILD / f"{target.name}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            command, check=False, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=output, stderr=output
        )
    if done.returncode != 0:
        raise SystemExit(f"{target.name} cannot be made:\n{log.read_text(errors='replace')[-2000:]}")
    partial.rename(target)
    return target
