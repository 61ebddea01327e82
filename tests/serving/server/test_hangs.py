"""Notice what hangs: /health names it, the log has its stack, and calls do not wait for it behind a green light."""

import concurrent.futures
import contextlib
import json
import os
import signal

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import patience
from tests.serving.server.hanging_engine import HOLDS_THE_LOCK, WAITS
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig

TEXT = {"prompt": "hello", "max_tokens": 2}


def health(server) -> tuple[int, str]:
    reply = httpx.get(f"{server.url}/health", timeout=patience())
    return reply.status_code, reply.json()["error"]["message"] if reply.is_error else ""


def wait_for_trouble(server, part: str) -> str:
    server.wait_for(lambda: part in health(server)[1])
    status, trouble = health(server)
    assert status == 503
    return trouble


@contextlib.contextmanager
def stopped(pid: int):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def child(server, name: str) -> int:
    (pid,) = [pid for called, pid in server.children().items() if name in called]
    return pid


def post_later(pool, server, **fields):
    return pool.submit(httpx.post, f"{server.url}/v1/completions", json=TEXT | fields, timeout=patience())


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")
    os.mkfifo(folder / "gate")
    return folder / "gate"


@pytest.fixture(scope="module")
def hanging_server(gate):
    """The real engine, whose steps may take a second."""
    engine = EngineConfig(model=str(gate.parent), num_pages=48, max_num_seqs=4)
    with start_server(
        engine, "tests.serving.server.hanging_engine", engine_timeout=1.0, log_format="json", max_restarts=0
    ) as server:
        yield server


def engine_reports(server) -> list[dict]:
    """Return the log's lines on hangs of the engine; on a busy machine a text worker may be late too."""
    lines = [json.loads(line) for line in server.output().splitlines() if line.startswith('{"time"')]
    return [line for line in lines if line["event"] == "hang" and line["part"] == "engine"]


@pytest.mark.parametrize(
    ("first_token", "sentence", "frame"),
    [
        (WAITS, "the engine has been busy with a step for", "in wait_for_gate"),
        (HOLDS_THE_LOCK, "the engine has not reported for", "in hold_the_lock"),
    ],
)
def test_a_step_that_hangs_turns_health_red_and_its_stack_is_logged_once(
    hanging_server, gate, first_token, sentence, frame
):
    server, before = hanging_server, len(engine_reports(hanging_server))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reply = post_later(pool, server, prompt=[first_token, 3])
        try:
            wait_for_trouble(server, sentence)
            server.wait_for(lambda: any(frame in line["message"] for line in engine_reports(server)[before:]))
            assert httpx.get(f"{server.url}/health_generate", timeout=patience()).status_code == 503
        finally:
            gate.open("w").close()
        assert reply.result().status_code == 200, "a late answer is still an answer"
    server.wait_for(lambda: health(server)[0] == 200)
    server.wait_for(lambda: engine_reports(server)[-1]["message"] == "the engine goes on")
    reports = [line["message"] for line in engine_reports(server)[before:]]
    # On a busy machine the engine may be late at other times, too.
    (hang,) = [place for place, message in enumerate(reports) if frame in message]
    assert reports[hang].startswith(sentence)
    assert "in run" in reports[hang], "the whole stack"
    assert reports[hang + 1] == "the engine goes on"


def test_a_stopped_engine_turns_health_red_until_it_goes_on(stub_model):
    with start_server(EngineConfig(model=str(stub_model))) as server:
        pid = child(server, "stub_engine")
        with stopped(pid):
            assert "the engine has not reported for" in wait_for_trouble(server, "the engine")
        server.wait_for(lambda: health(server)[0] == 200)


def test_calls_go_past_a_stopped_text_worker(slow_model):
    with (
        start_server(EngineConfig(model=str(slow_model)), tokenizer_workers=2) as server,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        early = [post_later(pool, server, max_tokens=100) for _ in range(2)]
        server.wait_for(lambda: server.metric("num_requests_running") == 2)
        pid = child(server, "frontend.worker 1")
        with stopped(pid):
            assert "the text worker 1 has not reported for" in wait_for_trouble(server, "text worker")
            server.wait_for(lambda: f"kill -CONT {pid}" in server.output())
            for _ in range(6):
                assert server.post("/v1/completions", TEXT).status_code == 200
                assert server.post("/tokenize", {"prompt": "a b"}).status_code == 200
            assert httpx.get(f"{server.url}/health_generate", timeout=patience()).status_code == 503
            assert health(server)[0] == 503
        assert [reply.result().status_code for reply in early] == [200, 200], "what it had goes on when it does"
        server.wait_for(lambda: health(server)[0] == 200)
        # Each hang is said once; on a busy machine the worker may be late at other times, too.
        words = ("the text worker 1 has not reported", "the text worker 1 goes on")
        server.wait_for(lambda: len({server.output().count(one) for one in words}) == 1)
        assert httpx.get(f"{server.url}/health_generate", timeout=patience()).status_code == 200


def test_calls_end_with_an_error_when_their_text_worker_stays_away(stub_model):
    with (
        start_server(EngineConfig(model=str(stub_model)), engine_timeout=1.0, max_restarts=0) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
        stopped(child(server, "frontend.worker")),
    ):
        text = post_later(pool, server)
        tokens = pool.submit(httpx.post, f"{server.url}/tokenize", json={"prompt": "a b"}, timeout=patience())
        for reply in (text.result(), tokens.result()):
            assert (reply.status_code, reply.json()["error"]["type"]) == (503, "engine_unavailable")
        wait_for_trouble(server, "text worker 0")
        reply = server.post("/v1/completions", TEXT)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "engine_unavailable")


def test_health_generate_goes_through_every_text_worker(stub_model):
    with (
        start_server(EngineConfig(model=str(stub_model)), tokenizer_workers=2) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        before = server.metric("generation_tokens_total")
        with stopped(child(server, "frontend.worker 1")):
            asked = pool.submit(httpx.get, f"{server.url}/health_generate", timeout=patience())
            server.wait_for(lambda: server.metric("generation_tokens_total") == before + 1)
            assert not asked.done(), "one token is still to come"
        assert asked.result().status_code == 200
        server.wait_for(lambda: server.metric("generation_tokens_total") == before + 2)
