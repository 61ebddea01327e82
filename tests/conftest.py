"""Set before torch is imported, and inherited by the servers that tests start."""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import httpx._transports.default as http_transports
import pytest
from hypothesis import HealthCheck, Phase, settings

pytest_plugins = ["tests.seeding", "tests.tiers"]

# Test models are tiny: a second thread only waits, and on a busy machine its spinning makes a step 50 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes are started, which would compile the same modules again and again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A client reads the certificates of all authorities, 40 ms of work, and where a test waits there are fifty a second.
http_transports.create_ssl_context = functools.cache(http_transports.create_ssl_context)

# Trees of syntax, schedulers and tensors live on here: to look through them for garbage, as often as Python does unless
# told otherwise, took a fifth of a run.
gc.set_threshold(20_000, 50, 100)

# Packed weights of tests are of no use to anybody else, and their servers are not those of the user: `tokenmill ps` and
# `stop` find them in the runtime folder.
_home = tempfile.mkdtemp(prefix="tokenmill-test-home-")
os.environ["HOME"] = os.environ["XDG_RUNTIME_DIR"] = _home
atexit.register(shutil.rmtree, _home, ignore_errors=True)

# Without a GPU the Triton kernels run interpreted; whether they do is decided when they are first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests assert no times: how fast inputs are drawn and run says only what else the machine does. No examples of earlier
# runs are kept: the seed alone decides what is drawn.
settings.register_profile(
    "tests",
    max_examples={"check": 10, "nightly": 1000}.get(os.environ.get("TIER", ""), 100),  # as tests/tiers.py scales others
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# A fault need not be made small to be counted as caught (benchmarks/mutants.py).
settings.register_profile("mutants", settings.get_profile("tests"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("TOKENMILL_HYPOTHESIS_PROFILE", "tests"))


# What starts processes or interprets kernels, the longest first: a worker that began one of these late would end alone.
_FIRST = (
    "serving/server", "threats", "engine/parallel", "engine/runner", "model/models", "model/structured", "integration",
    "house", "tools", "serving/web", "serving/proxy", "engine/loop", "engine/scheduler", "model/weights", "cli",
    "model/kernels", "model/vision", "model/adapters", "llm", "startup", "ipc",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders in front whose files take longest; `make check` has an order of its own."""
    if os.environ.get("TIER") == "check":
        return

    def rank(item: pytest.Item) -> int:
        name = item.nodeid.removeprefix("tests/")
        return next((number for number, folder in enumerate(_FIRST) if name.startswith(folder)), len(_FIRST))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import tests in one worker process first, which leaves bytecode for the others; collect no garbage meanwhile.

    Each collection would look through all that is imported, for a third of a second.
    """
    gc.disable()
    try:
        with Path(__file__).open() as turn:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(turn, fcntl.LOCK_SH)
            return (yield)
    finally:
        gc.enable()
        gc.freeze()
