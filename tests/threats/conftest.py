import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_proxy import start_proxy
from tests.serving.server.running_server import start_server
from tests.threats.bystander import Bystander
from tokenmill.config.configs import EngineConfig

KEYS = ("key-of-one-tenant", "key-of-another")


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory):
    """A model folder for the stub engine, which repeats the prompt."""
    return write_folder(tmp_path_factory.mktemp("models") / "echo", byte_level_tokenizer(), config={"stub": {}})


@pytest.fixture(scope="session")
def guarded_server(stub_folder):
    """A running server that wants a key."""
    with start_server(EngineConfig(model=str(stub_folder)), api_key=KEYS) as server:
        server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield server


@pytest.fixture(scope="session")
def guarded_proxy(guarded_server):
    """A proxy in front of it, with the same keys."""
    with start_proxy([guarded_server.url], [guarded_server.url], api_key=KEYS) as proxy:
        proxy.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield proxy


@pytest.fixture(autouse=True)
def bystander(request):
    """Every attack on the guarded server has a bystander who must not notice."""
    if "guarded_server" not in request.fixturenames:
        yield None
        return
    with Bystander(request.getfixturevalue("guarded_server").url, KEYS[1]) as found:
        yield found
