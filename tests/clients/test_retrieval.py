"""LangChain, LlamaIndex, Haystack, mem0 and txtai against a served encoder, in an environment of their own.

Their requirements are many, and exclude some of our pins; `make clients` installs them apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.clients.test_instructor import PYTHON as MAIN_PYTHON
from tests.encoder_checkpoints import make_encoder, write_word_pieces
from tests.integration.serving import MODEL_NAME
from tests.serving.server.running_server import REPOSITORY, serving

PYTHON = Path(os.environ.get("RETRIEVAL_PYTHON") or Path(sys.prefix, "retrieval", "bin", "python"))


QUIET = {"MEM0_TELEMETRY": "False", "HAYSTACK_TELEMETRY_ENABLED": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def has_txtai() -> bool:
    return any(MAIN_PYTHON.parents[1].glob("lib/python*/site-packages/txtai"))


def answers_of(script: str, python: Path, tmp_path: Path, *more: str) -> str:
    """Return the output of a script that asks a served encoder."""
    folder = make_encoder(tmp_path / "encoder", "bert", hidden_size=64, num_attention_heads=4)
    write_word_pieces(folder)
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder), "--served-model-name", MODEL_NAME]
    with serving(command, REPOSITORY) as server:
        asked = [str(python), str(Path(__file__).with_name(script)), server.url, MODEL_NAME, *more]
        env = {**os.environ, **QUIET, "HOME": str(tmp_path)}
        done = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs what this needs")
def test_clients_for_retrieval_get_the_vectors_and_the_order(tmp_path: Path) -> None:
    said = answers_of("with_retrieval.py", PYTHON, tmp_path)
    assert said.count("vectors") == 4
    assert "langchain rerank" in said


@pytest.mark.skipif(not has_txtai(), reason="`make clients` installs what this needs")
def test_txtai_finds_texts_by_the_vectors(tmp_path: Path) -> None:
    assert "txtai 3 vectors" in answers_of("with_txtai.py", MAIN_PYTHON, tmp_path, sysconfig.get_path("purelib"))
