import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tokenmill.cli.remote import RemoteModel, ServerRefused, events

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
    expected = {"model": "the-model", "stream": True, "temperature": 0}
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
