"""uvloop has no build for every platform: without it the server runs on asyncio's own loop."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
if {is_missing}:
    sys.modules["uvloop"] = None
from tokenmill.serving.server.process.api_process import run_loop

async def loop_class():
    import asyncio
    return type(asyncio.get_running_loop()).__module__

print(run_loop(loop_class()))
"""


@pytest.mark.parametrize("is_missing", [False, True])
def test_the_server_has_a_loop_with_uvloop_and_without(is_missing):
    program = PROGRAM.format(is_missing=is_missing)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("asyncio" if is_missing else "uvloop")
