"""TLS: a server with a certificate of its own, made here, and clients that trust it or do not."""

import contextlib
import shutil
import ssl
import subprocess

import httpx
import openai
import pytest

from tests.eventually import patience
from tests.serving.server.running_server import start_server
from tests.threats.raw_http import connect, exchange, read_all
from tokenmill.config.configs import EngineConfig

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make a certificate with")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Paths of a self-signed certificate for 127.0.0.1 and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    extension = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *extension, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return cert, key


@pytest.fixture(scope="module")
def tls_server(stub_model, certificate):
    cert, key = certificate
    with start_server(EngineConfig(model=str(stub_model)), ssl_certfile=str(cert), ssl_keyfile=str(key)) as server:
        server.url = server.url.replace("http://", "https://")
        yield server


@pytest.fixture
def trusting(certificate):
    with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate[0])), timeout=patience()) as client:
        yield client


def test_a_client_that_trusts_the_certificate_is_served(tls_server, trusting):
    client = openai.OpenAI(base_url=f"{tls_server.url}/v1", api_key="none", max_retries=0, http_client=trusting)
    messages = [{"role": "user", "content": "over tls"}]
    whole = client.chat.completions.create(model="echo", messages=messages, max_tokens=12)
    assert whole.choices[0].message.content
    stream = client.chat.completions.create(model="echo", messages=messages, max_tokens=12, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert streamed == whole.choices[0].message.content


def test_one_that_does_not_trust_it_is_not(tls_server):
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{tls_server.url}/health", timeout=patience())


def test_plain_text_gets_nothing_and_harms_nobody(tls_server, trusting):
    reply = exchange(tls_server.url, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b"HTTP/1.1 2" not in reply and b"echo" not in reply
    assert trusting.get(f"{tls_server.url}/health").status_code == 200


def test_handshakes_that_do_not_begin_end_and_keep_nobody_out(stub_model, certificate, trusting):
    cert, key = certificate
    files = {"ssl_certfile": str(cert), "ssl_keyfile": str(key), "max_files": (256, 256)}
    with start_server(EngineConfig(model=str(stub_model)), head_timeout=1.0, **files) as server:
        health = server.url.replace("http://", "https://") + "/health"
        with contextlib.ExitStack() as stack:
            many = [stack.enter_context(connect(server.url, 30.0)) for _ in range(300)]
            assert [trusting.get(health).status_code for _ in range(3)] == [200] * 3
            assert read_all(many[-1]) == b"", "closed when its second is over"
