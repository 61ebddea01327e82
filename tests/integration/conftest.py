from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.integration.serving import MAX_MODEL_LEN, MODEL_NAME, TIGHT, serve
from tests.serving.server.running_server import RunningServer
from tokenmill import LLM


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("integration") / MODEL_NAME)


@pytest.fixture(scope="session")
def offline(model: Path) -> Iterator[LLM]:
    """The same checkpoint without a server, with room for everything and no prefix cache."""
    with LLM(model, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="session")
def tight_server(model: Path) -> Iterator[RunningServer]:
    """A server whose requests compete for pages, so that they preempt one another."""
    with serve(model, *TIGHT) as server:
        yield server
