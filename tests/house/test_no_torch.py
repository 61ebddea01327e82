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


# Modules of the weights that cannot be imported where there is no torch, and what brings it; a shorter list is better.
WITH_TORCH = {
    "importance": "a decoder runs",
    "mixture": "a decoder runs",
}


def rooms() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [one for one in contracts if one["name"].startswith("No torch where")]
    return contract["source_modules"]


def test_weights_are_read_without_torch_but_for_a_list():
    program = """
import importlib, pkgutil, sys
sys.modules["torch"] = sys.modules["transformers"] = None
package = importlib.import_module("tokenmill.model.weights")
prefix = f"{package.__name__}."
for module in pkgutil.walk_packages(package.__path__, prefix):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError:
        print(module.name.removeprefix(prefix))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(WITH_TORCH)


@pytest.mark.parametrize("room", rooms())
def test_every_module_of_a_room_can_be_imported_without_torch(room):
    command = [sys.executable, "-P", "-c", PROGRAM, room]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
