import socket

import pytest

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.serving.server.http.listener import bind, check_tls, is_on_loopback, url


def test_an_address_that_cannot_be_taken_is_named(tmp_path):
    with pytest.raises(InvalidConfig, match=r"--host no\.such\.host\.invalid"):
        bind(ServerConfig(host="no.such.host.invalid"))
    with pytest.raises(InvalidConfig, match="--uds needs a path"):
        ServerConfig(uds="").resolve()
    with pytest.raises(InvalidConfig, match=r"--uds .*no/folder"):
        bind(ServerConfig(uds=str(tmp_path / "no" / "folder")))
    with pytest.raises(InvalidConfig, match=r"cannot listen on 192\.0\.2\.1:8000"):
        bind(ServerConfig(host="192.0.2.1"))


def test_a_certificate_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidConfig, match=r"--ssl-certfile .*cert"):
        check_tls(ServerConfig(ssl_certfile=str(tmp_path / "cert"), ssl_keyfile=str(tmp_path / "key")))
    (tmp_path / "cert").write_text("no certificate")
    with pytest.raises(InvalidConfig, match=r"--ssl-certfile .*cert"):
        check_tls(ServerConfig(ssl_certfile=str(tmp_path / "cert"), ssl_keyfile=str(tmp_path / "cert")))
    check_tls(ServerConfig())


def test_an_abandoned_socket_file_is_taken_over_but_no_other_file(tmp_path):
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    bind(ServerConfig(uds=str(path))).close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(InvalidConfig):
        bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "precious"


def test_the_socket_of_a_running_server_is_left_alone(tmp_path):
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as running:
        running.bind(str(path))
        running.listen()
        with pytest.raises(InvalidConfig):
            bind(ServerConfig(uds=str(path)))
        assert path.exists()


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")])
def test_the_url_is_one_that_a_browser_can_open(host, shown):
    config = ServerConfig(host=host, port=0)
    try:
        listener = bind(config)
    except InvalidConfig:
        pytest.skip(f"this machine has no {host}")
    with listener:
        assert url(config, listener) == f"http://{shown}:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_it_is_known_who_can_reach_the_socket(host, expected):
    try:
        listener = bind(ServerConfig(host=host, port=0))
    except InvalidConfig:
        pytest.skip(f"this machine has no {host}")
    with listener:
        assert is_on_loopback(listener) == expected


def test_a_unix_socket_is_not_on_the_loopback(tmp_path):
    with bind(ServerConfig(uds=str(tmp_path / "api.sock"))) as listener:
        assert not is_on_loopback(listener)
