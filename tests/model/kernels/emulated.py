"""Plug-in for pytest: puts a build of the native kernels with emulated instruction sets in the place of the real one.

    cmake -S native -B DIR -G Ninja -DEMULATED=ON "-DLEVELS=avx512;avx512vnni;amx" && ninja -C DIR
    EMULATED_KERNELS=DIR pytest -p tests.model.kernels.emulated tests/model/kernels/test_native_linear.py

`test_native_levels.py` compares levels, so it wants more than one: "avx2;avx512;avx512bf16".
The build takes minutes and the tests are slow, so no suite runs them: they are for changes of these levels on a machine
that has none of them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from tokenmill.model.kernels.native import MODULE

(_built,) = Path(os.environ["EMULATED_KERNELS"]).glob("_native*.so")
_spec = importlib.util.spec_from_file_location(MODULE, _built)
assert _spec is not None and _spec.loader is not None
sys.modules[MODULE] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[MODULE])
