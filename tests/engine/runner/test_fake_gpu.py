"""Engines issue no hidden copy to a GPU, read back no number and give kernels no tensor of the host, in any family.

The device is made up (`fake_gpu.py`); its process runs some cases, a second or two each, and all of them at night.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, architecture_of
from tests.encoder_checkpoints import ENCODERS, encoder_architecture_of
from tests.tiers import tier
from tokenmill.config.configs import EngineConfig
from tokenmill.model.attention.backend_rows import BACKENDS
from tokenmill.model.models.families import FAMILIES as REGISTRY
from tokenmill.startup.assembly.adapters import Adapters
from tokenmill.startup.assembly.capabilities import CAPABILITIES
from tokenmill.startup.assembly.capability import Capability
from tokenmill.startup.assembly.encoder_outputs import EncoderOutputs
from tokenmill.startup.assembly.encoders import Encoders
from tokenmill.startup.assembly.grammars import Grammars
from tokenmill.startup.assembly.kv_metrics import KVMetrics
from tokenmill.startup.assembly.kv_transfer import KVEvents, KVTransfers
from tokenmill.startup.assembly.media import Images, Sound
from tokenmill.startup.assembly.partial_hits import PartialHits
from tokenmill.startup.assembly.pooling import Pooling
from tokenmill.startup.assembly.prompt_progress import PromptsInProgress
from tokenmill.startup.assembly.recurrent_states import RecurrentStates
from tokenmill.startup.assembly.sleep import Sleep
from tokenmill.startup.assembly.speculation import Speculation
from tokenmill.startup.assembly.windows import Windows

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
# Files that may copy to the device in a step, without a wait, and why.
ALLOWED = {
    "model/sampling/processors.py": "parts of the few rows that change their logits; from pageable memory",
    "model/sampling/logprobs.py": "which rows report log probabilities",
    "model/sampling/grammar_rows.py": "masks of grammars, which are filled while the step runs",
    "model/kernels/triton/adapters.py": "an adapter that enters its slot: once, not step by step",
    "engine/transfer/device_pages.py": "pages that come from other memory, by threads and a stream of their own",
}
# Files that may copy to the host in a step, and why; of those that wait for it, too.
FETCHES = {
    "engine/transfer/device_pages.py": "pages that go to other memory, by threads and a stream of their own",
}
WAITS = {
    "model/pooling/rows.py": "a text's vector is made on the host, from one copy of what is pooled",
}
# Engines that may compile kernels while requests run, and why.
LATE = {"eager": "a mode to find faults in; its decodes take other forms as contexts grow"}
# Names of config.json's of which the same module reads the same layers as of a name that is tried.
TRIED_BY_OTHERS = ("ForMaskedLM", "ForConditionalGeneration")
AS_ANOTHER = {"CamembertModel": "RobertaModel", "NewModel": "GteModel"}
# Its scores fall with distance, and no kernel for GPUs lowers them: it is refused there.
ON_CPUS_ALONE = {"JinaBertModel"}
# Words in the names of cases without graphs, besides encoders: of ranks that share a context as much travels as a step
# has.
WITHOUT_GRAPHS = (*LATE, "one context")
# What each capability is seen in.
CAPABILITY_CASES: dict[type[Capability], str] = {
    Grammars: "grammar",
    Adapters: "adapters",
    Images: "images, qwen3 vl",
    Sound: "sound",
    EncoderOutputs: "kept outputs of a tower",
    Pooling: "modules behind a decoder",
    Encoders: "bert",
    RecurrentStates: "lfm2",
    Windows: "gemma3",
    Speculation: "drafts",
    PartialHits: "prompts that begin inside a page",
    KVTransfers: "KV in the host's memory",
    PromptsInProgress: "qwen3",
    KVMetrics: "qwen3",
}
# What GPUs do not have, and what happens on the host alone.
NOT_ON_GPUS: set[type[Capability]] = {Sleep, KVEvents}
# How ranks may share a model, and a case.
SHARED_CASES = {"tensor_parallel_size": "two ranks", "pipeline_parallel_size": "two stages"}
SHARED_CASES |= {"context_parallel_size": "one context"}
# Attention of GPUs, and a case; libraries that a process without a device cannot run.
BACKEND_CASES, LIBRARIES = {"triton": "qwen3", "hopper": "hopper"}, {"flash", "flashinfer"}
SECONDS = 280 if tier() != "nightly" else 1500


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return all that the process tells: the names of cases, and a record of each that it has run."""
    command = [sys.executable, "-m", "tests.engine.runner.fake_gpu_cases", str(tmp_path_factory.mktemp("fake"))]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def names(told: list[dict[str, Any]]) -> set[str]:
    """Return the names of all cases."""
    return set(told[0]["names"])


@pytest.fixture(scope="module")
def found(told: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the record of each case."""
    rows = told[1:]
    assert rows
    assert [row for row in rows if "failure" in row or row["errors"]] == []
    return {row["case"]: row for row in rows}


def test_captures_copy_nothing_and_steps_only_what_is_allowed(found: dict[str, dict[str, Any]]) -> None:
    for name, row in found.items():
        for phase, direction, blocking, line, _ in row["copies"]:
            place = line.partition(":")[0]
            if phase == "step" and direction == "to the host":
                assert place in (WAITS if blocking == "blocking" else FETCHES), f"{name}: {line}"
                continue
            assert (phase, direction, blocking) == ("step", "to the device", "not blocking"), f"{name}: {line}"
            assert place in ALLOWED, f"{name}: {line}"


def test_kernels_get_no_tensor_of_the_host(found: dict[str, dict[str, Any]]) -> None:
    assert {name: row["host_arguments"] for name, row in found.items() if row["host_arguments"]} == {}


def test_all_kernels_are_compiled_before_requests_run(found: dict[str, dict[str, Any]]) -> None:
    late = {name: row["late"] for name, row in found.items() if row["late"]}
    assert {name: kernels for name, kernels in late.items() if not any(word in name for word in LATE)} == {}


def test_all_but_eager_engines_have_graphs(found: dict[str, dict[str, Any]]) -> None:
    without = {*ENCODERS, *(name for name in found if any(word in name for word in WITHOUT_GRAPHS))}
    assert [name for name, row in found.items() if row["has_graphs"] == (name in without)] == []


def test_every_family_of_the_registry_is_among_the_cases() -> None:
    """By the name in config.json; those with a tower or a head that says no tokens have the layers of another."""
    tried = {*map(architecture_of, FAMILIES), *map(encoder_architecture_of, ENCODERS)}
    left = {name for name in REGISTRY if name not in tried and not name.endswith(TRIED_BY_OTHERS)}
    assert left == AS_ANOTHER.keys() | ON_CPUS_ALONE
    assert set(AS_ANOTHER.values()) <= tried


def test_every_capability_is_among_the_cases(names: set[str], found: dict[str, dict[str, Any]]) -> None:
    assert CAPABILITY_CASES.keys() | NOT_ON_GPUS == set(CAPABILITIES)
    assert set(CAPABILITY_CASES.values()) <= names
    for capability, case in CAPABILITY_CASES.items():
        assert case not in found or capability.__name__ in found[case]["capabilities"]
    assert not {name for row in found.values() for name in row["capabilities"]} & {one.__name__ for one in NOT_ON_GPUS}


def test_what_was_kept_in_other_memory_came_back(found: dict[str, dict[str, Any]]) -> None:
    kept = {name: row["num_loaded"] for name, row in found.items() if KVTransfers.__name__ in row["capabilities"]}
    assert all(kept.values()), kept


def test_every_way_to_share_a_model_and_every_attention_is_among_the_cases(names: set[str]) -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert {name for name in fields if name.endswith("_parallel_size")} - {"data_parallel_size"} == SHARED_CASES.keys()
    assert {row.name for row in BACKENDS if row.is_for_gpus} == BACKEND_CASES.keys() | LIBRARIES
    assert {*SHARED_CASES.values(), *BACKEND_CASES.values()} <= names
