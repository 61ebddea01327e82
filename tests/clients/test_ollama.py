"""Clients that speak Ollama against the served demo model, in the environment of `make clients`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.test_instructor import PYTHON
from tests.integration.serving import MODEL_NAME, serve
from tokenmill.demo import demo_model_path

NODE = PYTHON.parents[1] / "node"
CLIENTS = {"ollama", "langchain", "litellm", "llama-index", "haystack", "llm"}


@pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs what this needs")
def test_clients_of_python_give_the_same_answer() -> None:
    script = Path(__file__).with_name("with_ollama.py")
    with serve(demo_model_path(), "--num-pages", "400", "--max-num-seqs", "8") as server:
        command = [str(PYTHON), str(script), server.url, MODEL_NAME]
        # litellm would ask the internet what models cost.
        env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == CLIENTS


@pytest.mark.skipif(not (NODE / "node_modules").exists(), reason="`make clients` installs what this needs, with npm")
def test_ollamas_own_client_of_javascript_works() -> None:
    script = Path(__file__).with_name("with_ollama.mjs")
    with serve(demo_model_path(), "--num-pages", "400", "--max-num-seqs", "8") as server:
        command = ["node", str(script), server.url, MODEL_NAME]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, cwd=NODE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ollama.js")
