"""Engines issue no hidden copy to a GPU, read back no number and give kernels no tensor of the host, in any family.

The device is made up (`fake_gpu.py`); its process runs some cases, a second or two each, and all of them at night.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, architecture_of
from tests.encoder_checkpoints import ENCODERS, encoder_architecture_of
from tokenmill.model.models.families import FAMILIES as REGISTRY

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
# Lines that may copy in a step, without a wait, and why.
ALLOWED = {
    "model/sampling/processors.py": "parts of the few rows that change their logits; from pageable memory",
    "model/sampling/logprobs.py": "which rows report log probabilities",
}
# Lines that the host waits at in a step, and why.
WAITS = {
    "model/pooling/rows.py": "a text's vector is made on the host, from one copy of what is pooled",
}
# Engines that may compile kernels while requests run, and why.
LATE = dict.fromkeys(
    ("eager", "draft model, eager"), "a mode to find faults in; its decodes take other forms as contexts grow"
)
# Names of config.json's of which the same module reads the same layers as of a name that is tried.
TRIED_BY_OTHERS = ("ForMaskedLM", "ForConditionalGeneration")
AS_ANOTHER = {"CamembertModel": "RobertaModel", "NewModel": "GteModel"}
# Its scores fall with distance, and no kernel for GPUs lowers them: it is refused there.
ON_CPUS_ALONE = {"JinaBertModel"}
SECONDS = 280


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the record of each case."""
    command = [sys.executable, "-m", "tests.engine.runner.fake_gpu_cases", str(tmp_path_factory.mktemp("fake"))]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows
    assert [row for row in rows if "failure" in row or row["errors"]] == []
    return {row["case"]: row for row in rows}


def test_captures_copy_nothing_and_steps_only_what_is_allowed(found: dict[str, dict[str, Any]]) -> None:
    for name, row in found.items():
        for phase, direction, blocking, line, _ in row["copies"]:
            place = line.partition(":")[0]
            if phase == "step" and direction == "to the host" and place in WAITS:
                continue
            assert (phase, direction, blocking) == ("step", "to the device", "not blocking"), f"{name}: {line}"
            assert place in ALLOWED, f"{name}: {line}"


def test_kernels_get_no_tensor_of_the_host(found: dict[str, dict[str, Any]]) -> None:
    assert {name: row["host_arguments"] for name, row in found.items() if row["host_arguments"]} == {}


def test_all_kernels_are_compiled_before_requests_run(found: dict[str, dict[str, Any]]) -> None:
    assert {name: row["late"] for name, row in found.items() if row["late"] and name not in LATE} == {}


def test_all_but_eager_engines_have_graphs(found: dict[str, dict[str, Any]]) -> None:
    without = {*LATE, *ENCODERS}
    assert [name for name, row in found.items() if row["has_graphs"] == (name in without)] == []


def test_every_family_of_the_registry_is_among_the_cases() -> None:
    """By the name in config.json; those with a tower or a head that says no tokens have the layers of another."""
    tried = {*map(architecture_of, FAMILIES), *map(encoder_architecture_of, ENCODERS)}
    left = {name for name in REGISTRY if name not in tried and not name.endswith(TRIED_BY_OTHERS)}
    assert left == AS_ANOTHER.keys() | ON_CPUS_ALONE
    assert set(AS_ANOTHER.values()) <= tried
