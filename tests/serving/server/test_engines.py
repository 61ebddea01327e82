"""A server with several engines: requests are spread, each ends once, and every question reaches every engine."""

import concurrent.futures
import contextlib
import os
import signal

import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tests.serving.server.test_hangs import child, health, stopped, wait_for_trouble
from tokenmill.config.configs import EngineConfig
from tokenmill.ipc.topology import EngineSpec

TWO = (EngineSpec(0), EngineSpec(1))
TEXT = {"prompt": "hello there", "max_tokens": 3}
SLOW = {"step_seconds": 0.05}


def engines_of(server, name: str) -> list[float]:
    return [server.metric(name, engine=str(engine)) for engine in (0, 1)]


@contextlib.contextmanager
def two_engines(tmp_path, workers: int = 1, engines: tuple[EngineSpec, ...] = TWO, restarts: int = 0, **stubs: dict):
    """A server of stub engines; `stubs` are by their names in the config."""
    config = {name.replace("_", "-"): stub for name, stub in stubs.items()}
    folder = write_folder(tmp_path / "echo", byte_level_tokenizer(), config={"stub": {}} | config)
    how = {"engines": engines, "tokenizer_workers": workers, "max_restarts": restarts}
    with start_server(EngineConfig(model=str(folder)), **how) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with two_engines(tmp_path_factory.mktemp("two"), stub=SLOW) as running:
        yield running


def long_call(pool, server, **fields):
    return pool.submit(server.post, "/v1/completions", TEXT | {"max_tokens": 400} | fields)


@pytest.mark.parametrize("workers", [0, 2])
def test_many_requests_are_spread_and_each_is_answered_once(tmp_path, workers):
    with two_engines(tmp_path, workers) as server, concurrent.futures.ThreadPoolExecutor(40) as pool:
        bodies = [{"prompt": f"number {number}", "max_tokens": 9, "n": 1 + number % 2} for number in range(40)]
        # Where none ends before all are spread, it matters not which engine gets more of a busy machine's processors.
        server.post("/pause?mode=keep")
        calls = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        server.wait_for(lambda: sum(engines_of(server, "num_requests_running")) == 60)
        server.post("/resume")
        replies = [call.result().json() for call in calls]
        for body, reply in zip(bodies, replies, strict=True):
            assert [choice["text"] for choice in reply["choices"]] == [(body["prompt"] * 2)[:9]] * body["n"]
        server.wait_for(lambda: server.metric("request_success_total") == 60)
        server.wait_for(lambda: server.metric("generation_tokens_total") == 9 * 60)
        made = engines_of(server, "generation_tokens_total")
        assert min(made) > 9 * 60 / 4
        server.wait_until_unused()
        assert server.http.get(f"{server.url}/health_generate").status_code == 200
        ways = max(1, workers)
        server.wait_for(lambda: engines_of(server, "generation_tokens_total") == [count + ways for count in made])


def test_an_abort_reaches_the_engine_that_has_the_request(server):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [long_call(pool, server, request_id=f"call-{number}") for number in range(4)]
        server.wait_for(lambda: engines_of(server, "num_requests_running") == [2, 2])
        explained = [server.http.get(f"{server.url}/v1/requests/cmpl-call-{number}").json() for number in range(4)]
        engine_of = [report["requests"][0]["engine"] for report in explained]
        assert sorted(engine_of) == [0, 0, 1, 1]
        left = [2, 2]
        for number in range(4):
            server.post("/abort_requests", {"request_ids": [f"cmpl-call-{number}"]})
            left[engine_of[number]] -= 1
            server.wait_for(lambda: engines_of(server, "num_requests_running") == left)
        assert [call.result().json()["choices"][0]["finish_reason"] for call in calls] == ["abort"] * 4


def test_a_client_that_leaves_frees_its_engine(server):
    with server.http.stream("POST", f"{server.url}/v1/completions", json=TEXT | {"max_tokens": 400, "stream": True}):
        server.wait_for(lambda: sum(engines_of(server, "num_requests_running")) == 1)
    server.wait_until_unused()


def test_all_engines_pause_and_go_on(server):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [long_call(pool, server, max_tokens=100) for _ in range(2)]
        server.wait_for(lambda: engines_of(server, "num_requests_running") == [1, 1])
        assert server.post("/pause?mode=keep").json() == {"status": "paused"}
        counted = engines_of(server, "generation_tokens_total")
        with pytest.raises(concurrent.futures.TimeoutError):
            calls[0].result(timeout=0.5)
        assert engines_of(server, "generation_tokens_total") == counted
        assert server.post("/resume").json() == {"status": "running"}
        assert [call.result().status_code for call in calls] == [200, 200]


def test_the_cache_is_reset_when_all_engines_have_reset_theirs(server, tmp_path):
    assert server.post("/reset_prefix_cache").json() == {"status": "reset"}
    with two_engines(tmp_path, stub_1={"resets": False}) as unwilling:
        assert unwilling.post("/reset_prefix_cache").status_code == 409


def test_both_engines_are_described_and_their_load_is_one(server):
    info = server.http.get(f"{server.url}/server_info").json()
    described = [(one["engine"], one["num_ranks"], one["num_pages"], one["trouble"]) for one in info["engines"]]
    assert described == [(0, 1, 64, None), (1, 1, 64, None)]
    assert info["engine"]["max_model_len"] == 512
    with concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [long_call(pool, server) for _ in range(4)]
        server.wait_for(lambda: engines_of(server, "num_requests_running") == [2, 2])
        assert server.http.get(f"{server.url}/load").json()["num_requests_running"] == 4
        server.post("/abort_requests", {"abort_all": True})
        assert all(call.result().status_code == 200 for call in calls)


def test_the_engine_that_hangs_is_named(server):
    pid = child(server, "stub_engine 1 0")
    with stopped(pid):
        assert "the engine 1 has not reported for" in wait_for_trouble(server, "engine 1")
        assert "engine 0" not in health(server)[1]
        troubles = [one["trouble"] for one in server.http.get(f"{server.url}/server_info").json()["engines"]]
        assert troubles[0] is None
        assert "the engine 1 has not reported" in troubles[1]
        server.wait_for(lambda: f"kill -CONT {pid}" in server.output())
    server.wait_for(lambda: health(server)[0] == 200)
    server.wait_for(lambda: "the engine 1 goes on" in server.output())


def test_the_requests_of_an_engine_that_dies_go_to_the_other(tmp_path):
    with two_engines(tmp_path, restarts=1, stub=SLOW) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [long_call(pool, server, prompt="abc", max_tokens=150) for _ in range(4)]
        server.wait_for(lambda: engines_of(server, "num_requests_running") == [2, 2])
        os.kill(child(server, "stub_engine 1 0"), signal.SIGKILL)
        server.wait_for(lambda: server.metric("num_requests_running", engine="0") == 4)
        assert [call.result().json()["choices"][0]["text"] for call in calls] == ["abc" * 50] * 4
        server.wait_for(lambda: health(server)[0] == 200)
        assert "the engine 1 process was killed by SIGKILL" in server.output()


def test_the_end_of_one_engine_ends_the_server_with_its_name(tmp_path):
    with two_engines(tmp_path, stub=SLOW) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [long_call(pool, server) for _ in range(2)]
        server.wait_for(lambda: engines_of(server, "num_requests_running") == [1, 1])
        os.kill(child(server, "stub_engine 1 0"), signal.SIGKILL)
        assert [call.result().status_code for call in calls] == [503, 503]
        assert server.wait_for_end(60) == 1
        assert "the engine 1 process was killed by SIGKILL" in server.output()


def test_an_engine_that_cannot_start_is_named(tmp_path):
    folder = write_folder(
        tmp_path / "echo", byte_level_tokenizer(), config={"stub": {}, "stub-1": {"fail": "no room for it"}}
    )
    with (
        pytest.raises(AssertionError, match="engine 1: no room for it"),
        start_server(EngineConfig(model=str(folder)), engines=TWO),
    ):
        pass


def test_the_ranks_of_an_engine_are_started_and_watched(tmp_path):
    with two_engines(tmp_path, engines=(EngineSpec(0, num_ranks=2),)) as server:
        assert server.post("/v1/completions", TEXT).status_code == 200
        (described,) = server.http.get(f"{server.url}/server_info").json()["engines"]
        assert described["num_ranks"] == 2
        pid = child(server, "stub_engine 0 1")
        with stopped(pid):
            assert "the engine rank 1 has not reported" in wait_for_trouble(server, "engine rank 1")
        server.wait_for(lambda: health(server)[0] == 200)
        os.kill(pid, signal.SIGKILL)
        assert server.wait_for_end(60) == 1
        assert "the engine rank 1 process was killed by SIGKILL" in server.output()


def test_a_single_engine_is_described_as_ever(echo_server):
    info = echo_server.http.get(f"{echo_server.url}/server_info").json()
    (only,) = info["engines"]
    assert info["engine"].items() <= only.items()
    assert echo_server.metric("messages_dropped_total", inbox="engine") == 0
