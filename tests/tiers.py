"""Choose the tests of a run: three tiers, by the environment variable `TIER`.

- `check`: what a developer runs all day. No server or engine process, nothing slow, files and tests in random order.
- `test`, the default: all that a landing needs. Of tests with many cases that take long, some, drawn by the run's seed.
- `nightly`: long forms too, and every case.

A pytest plugin; tests/conftest.py loads it. Files are named here, so that `check` does not even import the others;
single tests carry `@pytest.mark.processes`, `slow` or `nightly`. A guard fails what does not belong in `check`.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.seeding import seed_for

TIERS = ("check", "test", "nightly")
MARKS = {
    "processes": "starts servers, engines or runs of tests: left out of `make check`",
    "slow": "takes seconds of processor time: left out of `make check`",
    "nightly": "a long form, or about how fast something is: run by `make nightly` alone",
}
# Of processor time, children's included. Tests of `make check` take a fraction; one over this is marked slow.
CPU_SECONDS = 8.0
# By how much random tests are shorter in `make check` than in `make test`, and longer in `make nightly`.
FACTOR = 10

# Programs and modules that take seconds to start.
LARGE = re.compile(
    r"^(tokenmill|.*/tokenmill|tokenmill\.(cli|startup|serving)\b.*|tests\.(engine|serving)\b.*|pytest)$"
)

TESTS = Path(__file__).parent
# Files by folder, without `test_` and `.py`; `*`: all of the folder and below.
PROCESSES = {
    "agents": "*",
    "cli": "bad_starts completion import_path launch main serve",
    "clients": "*",
    "engine/loop": "imports",
    "engine/parallel": "native_ranks nodes",
    "engine/parallel/devices": "engine",
    "house": "documents makefile no_torch python_children readme",
    "integration": "*",
    "ipc": "python_child",
    "model/kernels": "native_workers triton_compiles",
    "model/vision": "bombs server",
    "model/weights": "hub hub_pull",
    "nixl": "*",
    "ray": "*",
    "routers": "*",
    "serving/proxy": "process",
    "serving/server": (
        "adapters admin agent_session api_servers bad_requests batch_survival batches_api chat_api client_cases "
        "completions_api conformance disconnect embeddings end_to_end engines event_loop fleet hangs infill kv_disk "
        "lifecycle lost_log media messages_api native not_numbers observed overload poison prompt_fields ranks "
        "responses_api responses_of_agents routing sandboxes sessions split split_failures survival thinking_control "
        "tls tokenizer_info top unknown_fields"
    ),
    "serving/web": "*",
    "startup/assembly": "engine_process",
    "threats": (
        "amplification browsers control_plane deserialization fuzz identity leaks odd_values owners parameters "
        "reused_rows silence"
    ),
    "tools": "gpu_check",
}
# Engines with models, transformers as an oracle, interpreted Triton kernels.
SLOW = {
    "cli": "estimate",
    "engine/loop": "bad_starts greedy_equality memory_fit native_pass shared_prefix window_groups",
    "engine/parallel": "exactness forward slices",
    "engine/parallel/devices": "collective",
    "engine/runner": "cuda_graphs draft_model drafts fake_gpu grammar_drafts not_numbers on_device",
    "engine/speculation": "bounds exactness mutants",
    "house": "requirements",
    "lab/bench": "bench bench_serve quality",
    "llm": "async_llm llm parked_sessions session sleep threads vllm_shapes",
    "model/adapters": "batches native on_device oracle pirate reading",
    "model/attention": "flashinfer paged",
    "model/kernels": (
        "native_build triton_attention triton_decode_inputs triton_few_rows triton_fp8 triton_heads triton_kernels "
        "triton_matmul triton_norm_and_gate triton_recurrence triton_sampling triton_shapes"
    ),
    "model/models": "config_fields gemma3 gemma4 gpt_oss layers logits native_decoder phi3 recurrent",
    "model/structured": "answers cache custom_grammars lazy_calls lazy_rows masks thinking_budgets timing tool_calls",
    "model/vision": "images llm native on_device qwen25 shapes videos",
    "model/weights": "checkpoint gguf quantized_checkpoints stacked_experts",
    "real": "*",
    "startup/assembly": "capabilities warm_up",
    "startup/ranks": "group",
    "startup/sizing": "kv_size",
    "tools": "draw gpu_scripts",
}

# Of each test of these files, how many of its parametrized cases `make test` draws; `file::test`: of that test;
# `file::*`: how many tests of the file it draws, where each starts engines to fail or interprets kernels. All of them
# run in `make nightly`.
DRAWN = {
    "cli": {"bad_starts": 2, "main": 3, "serve": 2},
    "engine/loop": {
        "greedy_equality": 6,
        "shared_prefix": 2,
        "window_groups": 3,
        "window_groups::test_tokens_are_those_of_whole_pages_in_float32": 1,
    },
    "engine/scheduler": {
        **dict.fromkeys(("adapter_slots", "drafts", "late_samples"), 1),
        "fair::test_one_big_call_does_not_make_a_tiny_one_wait_and_loses_little": 2,
        "state_copies::test_one_row_runs_no_token_twice": 1,
        "state_copies::test_several_rows_come_to_an_end_and_nobody_yields_to_itself": 1,
        "state_copies::test_the_same_prompt_again_never_yields_to_itself": 12,
    },
    "engine/parallel": {"exactness": 2, "slices": 1},
    "engine/parallel/devices": {"collective": 3, "engine": 1, "engine::*": 2},
    "engine/runner": {
        **dict.fromkeys(("draft_model", "drafts", "grammar_drafts", "not_numbers", "on_device"), 2),
        "drafts::test_nor_on_a_device": 1,
        "grammar_drafts::test_nor_on_a_device": 1,
        "not_numbers::test_on_a_device_too": 1,
        "on_device::*": 12,
        "on_device::test_families_with_parts_of_their_own": 1,
        "on_device::test_recurrent_states_run_on_in_graphs": 1,
    },
    "integration": {"langchain": 1, "many_clients": 1, "tools": 2, "traps::*": 3},
    "ipc": {"sandbox": 2, "sandbox::test_however_many_idle_processes_are_lost_the_next_job_is_done": 1},
    "model/adapters": {"batches": 1, "native": 1, "on_device": 1, "oracle": 2},
    "model/attention": {"flashinfer": 1},
    "model/kernels": {"triton_attention": 3, "triton_recurrence": 2, "triton_sampling": 2},
    "model/models": {
        "config_fields": 5,
        "recurrent": 2,
        "recurrent::test_a_session_goes_on_from_its_state": 1,
        "recurrent::test_native_bits_do_not_depend_on_steps_states_and_preemptions": 1,
    },
    "model/structured": {"answers": 1, "cache": 2, "custom_grammars": 5},
    "model/sampling": {"distribution": 6},
    "model/vision": {"llm": 2, "native": 1, "on_device": 1},
    "model/weights": {"hub": 2},
    "serving/frontend": {"template_budget": 4},
    "serving/proxy": {"process": 1, "process::*": 3},
    "serving/server": {
        **dict.fromkeys(("api_servers", "engines", "event_loop", "hangs", "lifecycle", "lost_log", "sandboxes"), 1),
        **dict.fromkeys(("split", "survival"), 1),
        **dict.fromkeys(("client_cases", "disconnect"), 2),
        **dict.fromkeys(("fleet::*", "lost_log::*", "poison::*", "ranks::*", "survival::*"), 2),
        **dict.fromkeys(("hangs::*", "split_failures::*"), 3),
        **dict.fromkeys(("api_servers::*", "engines::*"), 6),
        "lifecycle::*": 10,
    },
    "serving/web": {"answers::*": 4, "browser": 3, "browser::*": 7},
    "startup/assembly": {"warm_up": 1},
    "startup/ranks": {"group": 1},
    "threats": {
        **dict.fromkeys(("amplification", "browsers", "identity", "silence"), 1),
        "large_bodies": 5,
        "reused_rows": 3,
        "silence::*": 9,
    },
}

Case = TypeVar("Case")
Other = TypeVar("Other")
STARTED = pytest.StashKey[list[str]]()


def tier() -> str:
    """Return the tier that runs.

    Raises:
        pytest.UsageError: `TIER` names none.
    """
    name = os.environ.get("TIER", "test")
    if name not in TIERS:
        raise pytest.UsageError(f"TIER={name} is unknown; choose one of {', '.join(TIERS)}")
    return name


def scaled(count: int) -> int:
    """Return how many random cases to draw: `count`, a tenth of them in `check`, ten times as many in `nightly`."""
    return {"check": max(1, count // FACTOR), "test": count, "nightly": count * FACTOR}[tier()]


def some(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` of the cases in their order, drawn by the seed of the run; all of them in `make nightly`."""
    if tier() == "nightly" or count >= len(cases):
        return list(cases)
    drawn = random.Random(seed_for(f"{count} of {len(cases)}")).sample(range(len(cases)), count)
    return [cases[index] for index in sorted(drawn)]


def pairs(first: Sequence[Case], second: Sequence[Other]) -> list[tuple[Case, Other]]:
    """Return pairs in which each of both is at least once, drawn by the seed of the run; all in `make nightly`."""
    places = [(row, column) for row in range(len(first)) for column in range(len(second))]
    if tier() != "nightly":
        rng = random.Random(seed_for(f"pairs of {len(first)} and {len(second)}"))
        rows, columns = (rng.sample(range(len(each)), len(each)) for each in (first, second))
        longer = max(len(rows), len(columns)) if places else 0
        drawn = {(rows[number % len(rows)], columns[number % len(columns)]) for number in range(longer)}
        places = sorted(drawn)
    return [(first[row], second[column]) for row, column in places]


def drawn_cases(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests without the cases that are not drawn; a test keeps as many as `DRAWN` says of its file."""
    files: dict[Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        files.setdefault(item.path, {}).setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: list[pytest.Item] = []
    for path, cases in files.items():
        counts, file = _drawn_of(path), path.stem.removeprefix("test_")
        for name in _drawn([*cases], counts.get(f"{file}::*"), f"tests of {path.name}"):
            count = counts.get(f"{file}::{name.rpartition('::')[2]}", counts.get(file))
            kept += _drawn(cases[name], count, f"cases of {name}")
    return kept


def _drawn(every: list[Case], count: int | None, name: str) -> list[Case]:
    if count is None or len(every) <= count or tier() == "nightly":
        return every
    chosen = random.Random(seed_for(name)).sample(range(len(every)), count)
    return [every[index] for index in sorted(chosen)]


def _drawn_of(file: Path) -> dict[str, int]:
    return DRAWN.get(file.relative_to(TESTS).parent.as_posix(), {}) if file.is_relative_to(TESTS) else {}


@cache
def marks_of(file: Path) -> tuple[str, ...]:
    """Return the marks that a file's place in the tables gives its tests."""
    if not file.is_relative_to(TESTS):
        return ()
    folder = file.relative_to(TESTS).parent
    name = file.stem.removeprefix("test_")
    return tuple(mark for mark, table in (("processes", PROCESSES), ("slow", SLOW)) if _holds(table, folder, name))


def _holds(table: dict[str, str], folder: Path, name: str) -> bool:
    if name in table.get(folder.as_posix(), "").split():
        return True
    return any(table.get(parent.as_posix()) == "*" for parent in (folder, *folder.parents))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks; watch in `check` for processes that are started."""
    for name, text in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    if tier() == "check":
        started: list[str] = []
        config.stash[STARTED] = started
        sys.addaudithook(lambda event, details: _refuse_children(started, event, details))


def _refuse_children(started: list[str], event: str, details: tuple[Any, ...]) -> None:
    """Note and refuse the start of a server, an engine or a run of tests. What is small may run: `git`, a sandbox."""
    if event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ:
        command = [os.fsdecode(word) for word in details[1]]
        if any(LARGE.search(word) for word in command):
            started.append(" ".join(command)[:200])
            raise RuntimeError("a test of `make check` starts a process: mark it, or name its file in tests/tiers.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out of `check` the files that the tables name, unread."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if tier() == "check" and is_test and marks_of(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark, leave out what belongs to other tiers, and shuffle the rest in `check`."""
    for item in items:
        for mark in marks_of(item.path):
            item.add_marker(mark)
    left_out = {"check": tuple(MARKS), "test": ("nightly",), "nightly": ()}[tier()]
    wanted = [item for item in items if not any(item.get_closest_marker(mark) for mark in left_out)]
    # Who names a test wants all of it.
    kept = wanted if any("::" in name for name in config.args) else drawn_cases(wanted)
    if others := list(set(items).difference(kept)):
        config.hook.pytest_deselected(items=others)
        items[:] = kept
    if tier() == "check":
        items[:] = shuffled(items)


def shuffled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in an order that the seed of the run decides: files, and tests within their file."""
    return sorted(items, key=lambda item: (seed_for(f"{item.location[0]} order"), seed_for(f"{item.nodeid} order")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test of `check` that started a process or was slow."""
    started = item.config.stash.get(STARTED, None)
    if started is None:
        return (yield)
    started.clear()
    before = cpu_seconds()
    outcome = yield
    took = cpu_seconds() - before
    if started:
        pytest.fail(f"it starts a process ({started[0]}): mark it, or name its file in tests/tiers.py", pytrace=False)
    if took > CPU_SECONDS:
        pytest.fail(f"it took {took:.1f} s of processor time: mark it slow, or name its file in tests/tiers.py", False)
    return outcome


def cpu_seconds() -> float:
    """Return the processor time of this process and of children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
