"""Clients that speak Ollama against the served demo model, in the environment of `make clients`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.test_instructor import PYTHON
from tests.integration.serving import MODEL_NAME, serve
from tokenmill.demo import demo_model_path


@pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs what this needs")
def test_langchain_litellm_and_ollamas_own_client_give_the_same_answer() -> None:
    script = Path(__file__).with_name("with_ollama.py")
    with serve(demo_model_path(), "--num-pages", "400", "--max-num-seqs", "8") as server:
        command = [str(PYTHON), str(script), server.url, MODEL_NAME]
        # litellm would ask the internet what models cost.
        env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"ollama", "langchain", "litellm"}
