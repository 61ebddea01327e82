"""Encoder servers: another process encodes, engines have its bits, and what it does wrong costs an encoding."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.audio_checkpoints import make_audio_checkpoint, noise
from tests.eventually import eventually, patience
from tests.model.audio.test_llm import chat as audio_chat
from tests.model.vision.test_encoder_outputs import WITH_LOGPROBS, answers
from tests.model.vision.test_llm import chat, encoder_of, picture
from tests.model.vision.test_server import chat_body, url_of
from tests.serving.server.running_server import RunningServer, start_server
from tokenmill import LLM
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

DTYPE = "bfloat16"


@contextlib.contextmanager
def encoder_server(checkpoint: Path, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process, and its address."""
    log = Path(tempfile.mkdtemp(dir=folder)) / "log"
    command = [sys.executable, "-m", "tokenmill", "serve", str(checkpoint), "--encoder-only", "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--dtype", DTYPE, *flags], stdout=out, stderr=out)
    try:

        def address() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(r"(http://\S+) encodes", log.read_text())

        found = eventually(address, seconds=60)
        yield process, found[1]
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(20) in (0, -signal.SIGKILL)


def ask_for(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("tokenmill.startup.assembly.encoder_outputs.ASK_SECONDS", seconds)


def alone(checkpoint: Path, chats: list[list[dict[str, object]]]) -> list[object]:
    with LLM(checkpoint, dtype=DTYPE, num_pages=100) as llm:
        return answers(llm.chat(chats, WITH_LOGPROBS))


def test_images_are_encoded_by_another_process(checkpoint: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    chats = [chat(picture(rng, 96, 96), "hello"), chat("two: ", picture(rng, 64, 96), picture(rng, 96, 64))]
    expected = alone(checkpoint, chats)
    with encoder_server(checkpoint, tmp_path, "--api-key", "secret") as (_, url):
        options = {"dtype": DTYPE, "num_pages": 100, "encoder_urls": (url,)}
        with LLM(checkpoint, encoder_api_key="secret", **options) as llm:  # type: ignore[arg-type]
            assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
            encoder = encoder_of(llm)
            assert (encoder.num_encoded, encoder.num_loaded, encoder.num_failed_loads) == (0, 21, 0)
            assert answers(llm.chat(chats[:1], WITH_LOGPROBS)) == expected[:1]
            assert encoder.num_loaded == 21
        with LLM(checkpoint, encoder_api_key="guessed", **options) as llm:  # type: ignore[arg-type]
            assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
            assert encoder_of(llm).num_encoded == 21


def test_sound_is_encoded_by_another_process(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, rng: np.random.Generator
) -> None:
    checkpoint = make_audio_checkpoint(tmp_path_factory.mktemp("qwen2-audio"))
    chats = [audio_chat(noise(rng, 1.0), "hello")]
    expected = alone(checkpoint, chats)
    with (
        encoder_server(checkpoint, tmp_path) as (_, url),
        LLM(checkpoint, dtype=DTYPE, num_pages=100, encoder_urls=(url,)) as llm,
    ):
        assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
        assert (encoder_of(llm).num_encoded, encoder_of(llm).num_loaded) == (0, 25)


def test_a_server_of_another_type_is_not_believed(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    chats = [chat(picture(rng, 64, 64), "hello")]
    expected = alone(checkpoint, chats)
    with (
        encoder_server(checkpoint, tmp_path, "--kernels", "torch") as (_, url),
        LLM(checkpoint, dtype=DTYPE, num_pages=100, encoder_urls=(url,)) as llm,
    ):
        assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
        assert encoder_of(llm).num_encoded == 4
    assert "it runs another model, other kernels or another release" in caplog.text


def test_two_engines_of_a_server_have_what_another_server_encodes(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Over HTTP: E/P/D without the D, engines in their own processes, and the encoder killed in between."""
    with encoder_server(checkpoint, tmp_path) as (process, url):
        engine = EngineConfig(
            model=str(checkpoint), dtype=DTYPE, num_pages=100, max_num_seqs=4, max_model_len=500,
            encoder_urls=(url,), encoder_store=str(tmp_path / "store"), enable_prefix_caching=False,
        )  # fmt: skip
        with start_server(
            engine, ENGINE_MODULE, served_model_name=("tiny",), data_parallel_size=2, routing_policy="fewest"
        ) as server:
            bodies = [chat_body(url_of(png(rng))) for _ in range(3)]
            texts = [text_of(server, body) for body in bodies]
            counts = lambda: [server.metric(f"mm_encoder_{name}tokens_total") for name in ("", "loaded_")]  # noqa: E731
            server.wait_for(lambda: sum(counts()) >= 27)
            assert counts() == [0, 27]
            process.kill()
            assert [text_of(server, body) for body in bodies * 2] == texts * 2
            assert counts()[0] == 0, "all lies in the store, whoever asks"
            text_of(server, chat_body(url_of(png(rng))))
            server.wait_for(lambda: counts()[0] == 9)


def png(rng: np.random.Generator) -> bytes:
    buffer = io.BytesIO()
    picture(rng, 96, 96).save(buffer, "PNG")
    return buffer.getvalue()


def text_of(server: RunningServer, body: dict[str, object]) -> str:
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_contents_that_are_none_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    spans = [[0, 4, "a", 4, 4, 0], [0, 4, "a", 5, 3, 0], [0, 0, "a", 4, 4, 0], [0, 1 << 20, "a", 4, 4, 0]]
    with encoder_server(checkpoint, tmp_path) as (process, url):
        assert httpx.get(f"{url}/health", timeout=patience()).status_code == 200
        for span in spans:
            reply = httpx.post(f"{url}/v1/encoder/outputs", json=[span, "AAAA"], timeout=patience())
            assert reply.status_code == 400, reply.text
        assert httpx.post(f"{url}/v1/encoder/outputs", json={"model": 1}, timeout=patience()).status_code == 400
        assert process.poll() is None


def test_no_answer_differs_while_servers_die_hang_and_come_back(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chaos within bounds: what happens to the process that encodes costs encodings, and no request."""
    ask_for(monkeypatch, 1.0)
    monkeypatch.setattr("tokenmill.engine.transfer.remote.encoder_client.REST_SECONDS", 0.1)
    rounds = [[chat(picture(rng, 64, 96), f"{number}") for number in range(4)] for _ in range(5)]
    expected = [alone(checkpoint, chats) for chats in rounds]
    with (
        encoder_server(checkpoint, tmp_path) as (process, url),
        encoder_server(checkpoint, tmp_path) as (second, also),
        LLM(checkpoint, dtype=DTYPE, num_pages=100, encoder_urls=(url, also)) as llm,
    ):
        encoder = encoder_of(llm)

        def run(number: int, harm: Callable[[], None]) -> None:
            timer = threading.Timer(float(rng.uniform(0, 0.05)), harm)
            timer.start()
            assert answers(llm.chat(rounds[number], WITH_LOGPROBS)) == expected[number]
            timer.join()
            assert encoder.num_loaded + encoder.num_encoded == 24 * (number + 1)

        run(0, lambda: None)
        assert encoder.num_encoded == 0
        run(1, lambda: process.send_signal(signal.SIGSTOP))
        run(2, lambda: process.send_signal(signal.SIGCONT))
        run(3, process.kill)
        run(4, second.kill)


class _Bad(http.server.BaseHTTPRequestHandler):
    """Answers as its server's `reply` says."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        with contextlib.suppress(OSError):
            self.server.reply(self)  # type: ignore[attr-defined]

    def log_message(self, *what: object) -> None:
        pass


def _send(handler: _Bad, status: int, body: bytes, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def _drip(handler: _Bad) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b"x")
        threading.Event().wait(0.1)


BAD = {
    "an error": lambda handler: _send(handler, 500, json.dumps({"error": "no"}).encode()),
    "nonsense": lambda handler: _send(handler, 200, b"\x00" * 10_000),
    "a header alone": lambda handler: _send(handler, 200, b'{"version":1}\n'),
    "half": lambda handler: _send(handler, 200, b"x" * 100, 1000),
    "silence": lambda handler: threading.Event().wait(2.0),
    "a drip": _drip,
}


@pytest.mark.parametrize("fault", [*BAD, "nobody there"])
def test_whatever_a_server_answers_the_engine_encodes(
    checkpoint: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    ask_for(monkeypatch, 0.5)
    chats = [chat(picture(rng, 64, 64), "hello"), chat("plain")]
    expected = alone(checkpoint, chats)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Bad)
    server.daemon_threads = True
    server.reply = BAD.get(fault)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        if fault == "nobody there":
            server.server_close()
        with LLM(checkpoint, dtype=DTYPE, num_pages=100, encoder_urls=(url,)) as llm:
            assert answers(llm.chat(chats, WITH_LOGPROBS)) == expected
            assert (encoder_of(llm).num_encoded, encoder_of(llm).num_loaded) == (4, 0)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
