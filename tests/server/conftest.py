import pytest

from tests.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.server.running_server import start_server
from tokenmill.config import EngineConfig


@pytest.fixture(scope="session")
def stub_model(tmp_path_factory):
    """A model folder for the stub engine, which repeats the prompt."""
    return write_folder(tmp_path_factory.mktemp("models") / "echo", byte_level_tokenizer(), config={"stub": {}})


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory):
    """The same at 20 tokens a second."""
    stub = {"step_seconds": 0.05}
    return write_folder(tmp_path_factory.mktemp("models") / "slow", byte_level_tokenizer(), config={"stub": stub})


@pytest.fixture(scope="session")
def echo_server(stub_model):
    """A running server whose engine repeats the prompt, one token a step."""
    with start_server(EngineConfig(model=str(stub_model))) as server:
        yield server
