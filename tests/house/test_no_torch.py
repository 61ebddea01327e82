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
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name != "ray":  # an extra, which few have
            raise
"""


def rooms() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [one for one in contracts if "torch" in one.get("forbidden_modules", ())]
    return contract["source_modules"]


@pytest.mark.parametrize("room", rooms())
def test_every_module_of_a_room_can_be_imported_without_torch(room):
    command = [sys.executable, "-P", "-c", PROGRAM, room]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
