import pytest

from tests.checkpoints import make_checkpoint
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE


@pytest.fixture(scope="session")
def stub_model(tmp_path_factory):
    """A model folder for the stub engine, which repeats the prompt."""
    return write_folder(tmp_path_factory.mktemp("models") / "echo", byte_level_tokenizer(), config={"stub": {}})


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory):
    """The same at 20 tokens a second; an answer has an end only where it may have no more tokens."""
    stub = {"step_seconds": 0.05, "max_model_len": 1_000_000}
    return write_folder(tmp_path_factory.mktemp("models") / "slow", byte_level_tokenizer(), config={"stub": stub})


@pytest.fixture(scope="session")
def echo_server(stub_model):
    """A running server whose engine repeats the prompt, one token a step."""
    with start_server(EngineConfig(model=str(stub_model))) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="session")
def chunked_server(tiny_checkpoint):
    """Steps of 32 tokens, so that prompts come in chunks; few pages, so that requests are preempted."""
    engine = EngineConfig(
        model=str(tiny_checkpoint), dtype="float32", num_pages=48, max_num_seqs=8, max_num_batched_tokens=32
    )
    with start_server(engine, ENGINE_MODULE) as server:
        yield server


@pytest.fixture
def responses(server):
    """/v1/responses of a test's own server, asked by OpenAI's client."""
    return server.client.responses
