import json
import random
import shutil
import socket
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tokenmill.llm.remote import RemoteModel, ServerRefused, events

TEXTS = ["Hel", "lo \u2028\x85 wörld 🙂", "", "\r\n end"]


def stream_of(texts, done=True) -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks]
    return (": comment\n\n" + "".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


def test_events_do_not_depend_on_how_the_stream_is_cut():
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    raw = stream_of(TEXTS)
    for _ in range(50):
        cuts = sorted(draw.randrange(len(raw) + 1) for _ in range(draw.randrange(8)))
        chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        texts = [event["choices"][0]["delta"].get("content") for event in events(chunks)]
        assert texts == [*TEXTS, None], f"seed {seed}"


def test_a_stream_that_breaks_off_is_an_error():
    with pytest.raises(ServerRefused, match="before it was complete"):
        list(events([stream_of(["a"], done=False)]))


class Stub(BaseHTTPRequestHandler):
    """Answers as told by the last message: a text to stream, or an error to give."""

    def do_GET(self):
        self._reply(200, {"data": [{"id": "the-model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        asked = body.get("prompt") or body["messages"][-1]["content"]
        if asked == "refuse":
            self._reply(400, {"error": {"message": "too long"}})
        elif asked == "garbage":
            self._reply(502, "bad gateway")
        elif asked == "fail":
            self._send(200, b'data: {"error": {"message": "engine died"}}\n\n')
        elif self.path == "/v1/completions":
            self._send(200, b'data: {"choices": [{"text": "abc", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n')
        else:
            self._send(200, stream_of(TEXTS))

    def log_message(self, *_):
        pass

    def _reply(self, status, document):
        self._send(status, json.dumps(document).encode())

    def _send(self, status, raw):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def model_at(server, **how) -> RemoteModel:
    return RemoteModel(f"http://127.0.0.1:{server.server_port}", **how)


def ask(model: RemoteModel, content: str, **fields):
    return list(model.chat([{"role": "user", "content": content}], fields))


def test_chat_streams_the_answer_of_the_model_that_is_served(server):
    deltas = ask(model_at(server, api_key="k"), "hi", temperature=0)
    assert "".join(delta.text for delta in deltas) == "".join(TEXTS)
    assert deltas[-1].finish_reason == "stop"
    path, body, key = server.seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    expected = {"model": "the-model", "stream": True, "temperature": 0, "return_progress": True}
    assert body == {**expected, "messages": [{"role": "user", "content": "hi"}]}


def test_complete_uses_the_named_model(server):
    (delta,) = model_at(server, model="other").complete("abc", {})
    assert (delta.text, delta.finish_reason) == ("abc", "length")
    assert server.seen[0][1]["model"] == "other"


def test_url_may_end_in_v1(server):
    assert ask(RemoteModel(f"http://127.0.0.1:{server.server_port}/v1/"), "hi")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("refuse", r"the server refuses \(400\): too long"),
        ("garbage", "the server refuses with status 502"),
        ("fail", "the server ended the answer: engine died"),
    ],
)
def test_errors_are_one_sentence(server, content, message):
    with pytest.raises(ServerRefused, match=message):
        ask(model_at(server), content)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[", "http://127.0.0.1:99999"])
def test_no_server_is_one_sentence(url):
    with pytest.raises(ServerRefused) as error:
        ask(RemoteModel(url), "hi")
    assert url in str(error.value)


def run_in_background(server) -> None:
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    extension = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *extension, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def tls_server(certificate):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    run_in_background(server)
    yield server
    server.shutdown()


def answer(url: str, **how) -> str:
    return "".join(delta.text for delta in RemoteModel(url, **how).chat([{"role": "user", "content": "hi"}], {}))


def test_a_certificate_that_is_not_trusted_is_not_called_a_missing_server(tls_server, certificate, server):
    url = f"https://127.0.0.1:{tls_server.server_port}"
    with pytest.raises(ServerRefused, match=rf"certificate of {url} is not trusted .*--cacert"):
        answer(url)
    assert answer(url, cacert=str(certificate[0])) == "".join(TEXTS)
    with pytest.raises(ServerRefused, match="does not speak TLS"):
        answer(f"https://127.0.0.1:{server.server_port}", cacert=str(certificate[0]))
    with pytest.raises(ServerRefused, match=r"--cacert missing\.pem: No such file"):
        answer(url, cacert="missing.pem")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else has the port, and nobody listens
        port = silent.getsockname()[1]
        with pytest.raises(ServerRefused, match=f"no server answers at https://127.0.0.1:{port}; start one"):
            answer(f"https://127.0.0.1:{port}")


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self):
        self.socket.bind(self.server_address)

    def get_request(self):
        connection, _ = self.socket.accept()
        return connection, ("unix", 0)


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}", "http+unix://{}"])
def test_a_server_on_a_unix_socket_is_reached(form, tmp_path):
    path = str(tmp_path / "s")
    server = UnixServer(path, Stub)
    run_in_background(server)
    assert answer(form.format(path), model="m", api_key="k") == "".join(TEXTS)
    assert [(at, key) for at, _, key in server.seen] == [("/v1/chat/completions", "Bearer k")]
    server.shutdown()
    with pytest.raises(ServerRefused, match="no server answers at unix:/nowhere"):
        answer("unix:/nowhere")
