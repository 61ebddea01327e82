"""LangChain, LlamaIndex, Haystack and mem0 against a served encoder, in an environment of their own.

Their requirements are many, and exclude some of our pins; `make clients` installs them apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.encoder_checkpoints import make_encoder, write_word_pieces
from tests.integration.serving import MODEL_NAME
from tests.serving.server.running_server import REPOSITORY, serving

PYTHON = Path(os.environ.get("RETRIEVAL_PYTHON") or Path(sys.prefix, "retrieval", "bin", "python"))


@pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs what this needs")
def test_clients_for_retrieval_get_the_vectors_and_the_order(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "encoder", "bert", hidden_size=64, num_attention_heads=4)
    write_word_pieces(folder)
    script = Path(__file__).with_name("with_retrieval.py")
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder), "--served-model-name", MODEL_NAME]
    quiet = {"MEM0_TELEMETRY": "False", "HAYSTACK_TELEMETRY_ENABLED": "False", "HOME": str(tmp_path)}
    with serving(command, REPOSITORY) as server:
        asked = [str(PYTHON), str(script), server.url, MODEL_NAME]
        done = subprocess.run(
            asked, check=False, capture_output=True, text=True, timeout=500, env={**os.environ, **quiet}
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("vectors") == 4
    assert "langchain rerank" in done.stdout
