"""The modules that need torch are those of `with_torch.txt` and no others; a shorter list is better.

    python -m tests.torchless.test_imports

writes the list anew. What it names is imported where a device, an image or a reference kernel asks for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.torchless import environment

LIST = Path(__file__).with_name("with_torch.txt")
PROGRAM = """
import importlib, pkgutil, sys
sys.modules["torch"] = sys.modules["transformers"] = None
import tokenmill
for module in pkgutil.walk_packages(tokenmill.__path__, "tokenmill."):
    if module.name in ("tokenmill.__main__", "tokenmill._native"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            print(module.name.removeprefix("tokenmill."))
        elif error.name != "ray":  # an extra, which few have
            raise
"""
# Packages of which nothing may need it: they know no device.
FREE = ("cli", "config", "core", "demo", "engine.kv", "engine.loop", "engine.scheduler", "engine.speculation", "ipc")
FREE += ("lab", "llm", "model.architecture", "model.quantization", "model.structured", "model.vocabulary", "serving")


def modules_with_torch() -> list[str]:
    """The modules that cannot be imported where there is no torch, by their names below `tokenmill`."""
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return sorted(done.stdout.split())


def test_no_other_module_needs_torch() -> None:
    found = modules_with_torch()
    assert found == LIST.read_text(encoding="utf-8").split()
    assert not [name for name in found for free in FREE if name == free or name.startswith(f"{free}.")]


if __name__ == "__main__":
    LIST.write_text("\n".join(modules_with_torch()) + "\n", encoding="utf-8")
