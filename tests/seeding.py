"""One seed for a whole run: all that tests draw follows from it and from their names.

A pytest plugin; tests/conftest.py loads it. The root is the environment variable `SEED`, else it is drawn freshly, and
a failure prints it. The root passes through the environment to xdist's workers and to processes that tests start.
Imports no torch: tests of policy, text and HTTP run without it.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

# As collected, before a plug-in adds to it.
NODE_ID = pytest.StashKey[str]()


def root_seed() -> int:
    """Return the seed of this run; the first call draws it unless `SEED` says it."""
    text = os.environ.setdefault("SEED", str(random.SystemRandom().randrange(2**32)))
    try:
        return int(text)
    except ValueError:
        raise pytest.UsageError(f"SEED={text} is not a whole number: set it to the number that a run printed") from None


def seed_for(name: str) -> int:
    """Return a number below 2^32 that the root seed and a name decide, in every process alike."""
    return int.from_bytes(hashlib.blake2b(f"{root_seed()} {name}".encode(), digest_size=4).digest(), "big")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of this test, apart from the global ones."""
    return np.random.default_rng(seed_for(f"{request.node.stash[NODE_ID]} rng"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep a test's own name."""
    item.stash[NODE_ID] = item.nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give hypothesis the same root before it reads its own option, unless that is set."""
    root = root_seed()
    if getattr(config.option, "hypothesis_seed", 0) is None:
        config.option.hypothesis_seed = root


def pytest_report_header() -> str:
    """Name the root at the head of a run."""
    return f"seed: {repeat()}"


def repeat() -> str:
    """Return the assignments that repeat this run, as a shell takes them before a command."""
    names = [name for name in ("SEED", "PYTHONHASHSEED") if name in os.environ]
    return " ".join(f"{name}={os.environ[name]}" for name in names)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the global generators by the test's name, before its first fixture draws."""
    seed_globals(item.stash[NODE_ID])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Seed a fixture that tests share by its own name: its draws do not depend on which test asks first."""
    if fixturedef.scope == "function":
        return (yield)
    restore = saved_globals()
    seed_globals(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    try:
        return (yield)
    finally:
        restore()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say with a failure how to draw the same again."""
    report = yield
    if report.failed:
        report.sections.append(("seed", f'{repeat()} python -m pytest "{item.stash[NODE_ID]}"'))
    return report


def seed_globals(name: str) -> None:
    """Seed `random` and numpy, and torch where it is loaded."""
    seed = seed_for(name)
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        # torch's own function asks for devices of all kinds: 3 ms for each test of thousands.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


def saved_globals() -> Callable[[], None]:
    """Return a function that puts the global generators back to where they are now."""
    states = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    of_torch = torch and torch.get_rng_state()

    def restore() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(of_torch)

    return restore
