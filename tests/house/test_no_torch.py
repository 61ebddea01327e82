"""Check that torch is not imported where the contract forbids it, not through others either."""

import subprocess
import sys
import tomllib

import pytest

from tests.house.source_tree import ROOT

PROGRAM = """
import importlib, pkgutil, sys
for name in ("torch", "transformers"):
    sys.modules[name] = None  # importing it fails
for room in sys.argv[1:]:
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "ray":  # an extra, which few have
                raise
"""


def rooms(contract: str) -> list[str]:
    """The modules of which a contract, whose name begins so, says that they import no torch."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [one for one in contracts if one["name"].startswith(contract)]
    return found["source_modules"]


def import_all(*modules: str) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("room", rooms("No torch where"))
def test_every_module_of_a_room_can_be_imported_without_torch(room: str) -> None:
    import_all(room)


def test_what_the_host_runs_can_be_imported_without_torch() -> None:
    import_all(*rooms("The host reads weights"))
