"""Start and end a server in many ways, and check that nothing is left behind."""

import contextlib
import json
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.eventually import join, patience
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import is_alive, spawn, start_server
from tokenmill.config.configs import EngineConfig

MESSAGES = [{"role": "user", "content": "hello"}]


def refuses_connections(server) -> bool:
    try:
        httpx.get(f"{server.url}/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # accepted by the kernel at the last moment
        return False
    return False


def open_stream(server, lines: list[str], **fields) -> threading.Thread:
    """Read a stream in a thread; `lines` fills with its events."""

    def read():
        body = {"messages": MESSAGES, "stream": True} | fields
        with (
            contextlib.suppress(httpx.RemoteProtocolError),  # the server was killed
            httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=patience()) as reply,
        ):
            for line in reply.iter_lines():
                if line:
                    lines.append(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    server.wait_for(lambda: lines)
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_lets_short_streams_end_and_cuts_long_ones(slow_model, number):
    with start_server(EngineConfig(model=str(slow_model)), tokenizer_workers=2, shutdown_timeout=12.0) as server:
        assert len(server.children()) == 3
        short, long = [], []
        threads = [open_stream(server, long), open_stream(server, short, max_tokens=40)]
        server.process.send_signal(number)
        server.wait_for(lambda: refuses_connections(server))
        assert server.wait_for_end() == 0
        for thread in threads:
            join(thread)
        assert '"finish_reason":"length"' in short[-2]
        assert '"type":"server_stopping"' in long[-2]
        assert short[-1] == long[-1] == "data: [DONE]"
        assert "stopping: 2 open requests have 12 s to end" in server.output()
        assert "Traceback" not in server.output()


def test_a_second_interrupt_does_not_wait(slow_model):
    with start_server(EngineConfig(model=str(slow_model)), shutdown_timeout=600) as server:
        lines: list[str] = []
        open_stream(server, lines)
        server.process.send_signal(signal.SIGINT)
        server.wait_for(lambda: "stopping: 1 open request has 600 s to end" in server.output())
        server.process.send_signal(signal.SIGINT)
        assert server.wait_for_end() == 0


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(stub_model):
    body = json.dumps({"messages": MESSAGES, "n": 128, "stream": True, "logprobs": True, "top_logprobs": 2})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with start_server(EngineConfig(model=str(stub_model)), shutdown_timeout=0.3) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(server.url)
        deaf.connect((address.hostname, address.port))
        deaf.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        # All is generated, and most of it cannot be sent.
        server.wait_for(lambda: 'finished_reason="length"} 128.0' in server.http.get(f"{server.url}/metrics").text)
        server.process.send_signal(signal.SIGINT)
        assert server.wait_for_end() == 0
        assert "Traceback" not in server.output()


@pytest.mark.parametrize("victim", ["stub_engine", "frontend.worker"])
def test_a_killed_child_that_may_not_return_ends_the_server_with_a_message(slow_model, victim):
    with start_server(EngineConfig(model=str(slow_model)), max_restarts=0) as server:
        lines: list[str] = []
        thread = open_stream(server, lines)
        (pid,) = [pid for name, pid in server.children().items() if victim in name]
        os.kill(pid, signal.SIGKILL)
        assert server.wait_for_end() == 1
        join(thread)
        assert '"type":"engine_unavailable"' in lines[-2]
        name = "engine" if victim == "stub_engine" else "text worker 0"
        assert f"the {name} process was killed by SIGKILL" in server.output()
        assert "Traceback" not in server.output()


def test_when_the_server_is_killed_its_children_end(slow_model):
    with start_server(EngineConfig(model=str(slow_model)), tokenizer_workers=2) as server:
        pids = list(server.children().values())
        assert len(pids) == 3
        server.process.kill()
        server.wait_for(lambda: not any(is_alive(pid) for pid in pids))
        server.wait_for(lambda: not list(server.private.iterdir()))


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.7])
def test_a_stop_during_the_start_leaves_nothing_behind(stub_model, seconds):
    running = spawn(EngineConfig(model=str(stub_model)))
    try:
        running.wait_for(lambda: list(running.private.iterdir()))
        time.sleep(seconds)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_for_end() == 0
        assert "Traceback" not in running.output()
    finally:
        running.process.kill()
        running.clean()


def test_a_stopped_engine_is_killed_at_the_end(slow_model):
    with start_server(EngineConfig(model=str(slow_model)), shutdown_timeout=0.2) as server:
        (engine,) = [pid for name, pid in server.children().items() if "stub_engine" in name]
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        assert server.wait_for_end() == 0


def end_of(engine: EngineConfig, **server) -> tuple[int, str]:
    running = spawn(engine, **server)
    try:
        code = running.wait_for_end()
        return code, "\n".join(line for line in running.output().splitlines() if not line.startswith("PROGRESS"))
    finally:
        running.process.kill()
        running.clean()


def stub_folder(tmp_path, **stub):
    return write_folder(tmp_path / "model", byte_level_tokenizer(), config={"stub": stub})


def test_an_engine_that_cannot_start_gives_its_sentence_and_its_exit_code(tmp_path):
    folder = stub_folder(tmp_path, fail="model.safetensors: tensor x is missing")
    assert end_of(EngineConfig(model=str(folder))) == (2, "model.safetensors: tensor x is missing")


def test_an_engine_that_crashes_shows_its_last_lines(tmp_path):
    code, output = end_of(EngineConfig(model=str(stub_folder(tmp_path, crash="bad luck"))))
    assert code == 1
    assert "the engine process ended with exit code 1" in output
    assert "  | RuntimeError: bad luck" in output


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_missing_tokenizer_gives_one_sentence(tmp_path, num_workers):
    folder = stub_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    code, output = end_of(EngineConfig(model=str(folder)), tokenizer_workers=num_workers)
    assert code == 2
    assert output == f"{folder} has no tokenizer.json"


def test_bad_default_sampling_parameters_are_refused_at_start(tmp_path):
    folder = stub_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 9}')
    code, output = end_of(EngineConfig(model=str(folder)))
    assert code == 2
    assert "generation_config.json: temperature must be in [0, 2], got 9" in output


def test_a_port_in_use_is_told_before_anything_is_loaded(stub_model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, output = end_of(EngineConfig(model=str(stub_model)), port=port)
    assert code == 2
    assert output == f"127.0.0.1:{port} is already in use; stop what uses it or choose another port with --port"


def test_nothing_answers_before_the_server_is_ready_and_its_folder_is_private_and_holds_no_key(stub_model):
    running = spawn(EngineConfig(model=str(stub_model)), api_key=("secret-key",))
    try:
        assert refuses_connections(running)
        running.wait_for(lambda: "READY" in running.output())
        assert httpx.get(f"{running.url}/health", timeout=patience()).status_code == 200
        (folder,) = running.private.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert "secret-key" not in (folder / "launch.json").read_text()
    finally:
        running.process.send_signal(signal.SIGINT)
        assert running.wait_for_end() == 0
        running.clean()


def test_a_unix_socket_serves_and_is_removed(stub_model, tmp_path):
    path = tmp_path / "api.sock"
    with start_server(EngineConfig(model=str(stub_model)), uds=str(path), enable_log_requests=True) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=patience()) as client:
            reply = client.post("http://x/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2})
            assert reply.status_code == 200
        server.wait_for(lambda: "2 output tokens" in server.output())
        code, output = end_of(EngineConfig(model=str(stub_model)), uds=str(path))
        assert (code, "already in use" in output) == (2, True)
        assert path.exists(), "a second server must leave the socket of the first one alone"
    assert not path.exists()


def test_the_api_process_is_started_again_and_who_connects_meanwhile_waits(slow_model):
    with start_server(EngineConfig(model=str(slow_model))) as server:
        pids = [server.api_pid, *server.children().values()]
        lines: list[str] = []
        thread = open_stream(server, lines)
        os.kill(server.api_pid, signal.SIGKILL)
        server.wait_for(lambda: not is_alive(pids[0]))
        # The connection is taken by the one that comes next; nothing is refused meanwhile.
        waiting = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert waiting.status_code == 200
        join(thread)
        assert "[DONE]" not in "".join(lines)
        assert "the API process was killed by SIGKILL; it is started again" in server.output()
        assert not any(is_alive(pid) for pid in pids)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_end() == 0
        assert len(pids) == 3


def test_orphans_that_do_not_end_are_killed(stub_model):
    with start_server(EngineConfig(model=str(stub_model))) as server:
        (engine,) = [pid for name, pid in server.children().items() if "stub_engine" in name]
        os.kill(engine, signal.SIGSTOP)
        os.kill(server.api_pid, signal.SIGKILL)
        server.wait_for(lambda: not is_alive(engine))
        server.wait_for(lambda: server.output().count("READY") == 2)


def test_an_api_process_that_dies_too_often_ends_the_server(stub_model):
    with start_server(EngineConfig(model=str(stub_model)), max_restarts=1) as server:
        for number in (1, 2):
            server.wait_for(lambda number=number: server.output().count("READY") == number)
            os.kill(server.api_pid, signal.SIGKILL)
        assert server.wait_for_end() == 1
        assert server.output().count("the API process was killed by SIGKILL") == 2


def test_the_parent_has_what_its_parts_share_and_hears_a_terminal_for_all(echo_server):
    status = Path(f"/proc/{echo_server.process.pid}/status").read_text()
    assert "\nThreads:\t1\n" in status
    assert os.getpgid(echo_server.api_pid) != os.getpgid(echo_server.process.pid)
    # API processes, engines and text workers are its forks, and share what it has imported: numpy and zmq.
    for library in ("starlette", "uvicorn", "torch", "tokenizers"):
        assert f"/{library}/" not in Path(f"/proc/{echo_server.process.pid}/maps").read_text()
