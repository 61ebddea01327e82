"""instructor against the served demo model, in an environment of its own.

It wants jiter and rich older than our pins (openai's client, rich), so `make clients` installs it apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.serving import MODEL_NAME, serve
from tokenmill.demo import demo_model_path

PYTHON = Path(os.environ.get("CLIENTS_PYTHON") or Path(sys.prefix, "clients", "bin", "python"))


@pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs what this needs")
def test_instructor_extracts_pydantic_models() -> None:
    script = Path(__file__).with_name("with_instructor.py")
    with serve(demo_model_path(), "--num-pages", "400", "--max-num-seqs", "8") as server:
        command = [str(PYTHON), str(script), f"{server.url}/v1", MODEL_NAME]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("city=") == 2
