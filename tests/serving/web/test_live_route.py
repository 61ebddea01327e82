"""GET /live as clients meet it."""

import json
import signal

import httpx
import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.ipc.topology import EngineSpec


def frames(reply):
    return (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))


def test_it_is_a_stream_of_frames_that_needs_the_key(slow_echo):
    with slow_echo.http.stream("GET", f"{slow_echo.url}/live") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        frame = next(frames(reply))
    assert (frame["engine"], frame["turns"], frame["requests"]) == (0, [], [])
    assert frame["stats"]["num_pages"] == frame["ready"]["num_pages"] == 64
    headers = {"Authorization": "Bearer another"}
    assert slow_echo.http.get(f"{slow_echo.url}/live", headers=headers).status_code == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_others_cannot_take_the_places_of_viewers(echo, site):
    reply = echo.http.get(f"{echo.url}/live", headers={"Sec-Fetch-Site": site})
    assert reply.status_code == 403
    with echo.http.stream("GET", f"{echo.url}/live", headers={"Sec-Fetch-Site": "same-origin"}) as reply:
        assert reply.status_code == 200


def test_it_shows_what_runs(slow_echo):
    http, url = slow_echo.http, slow_echo.url
    body = {"prompt": "one two three four five", "max_tokens": 100_000, "stream": True}
    with http.stream("POST", f"{url}/v1/completions", json=body), http.stream("GET", f"{url}/live") as reply:
        (request,) = next(frame["requests"] for frame in frames(reply) if frame.get("requests"))
        shown = http.get(f"{url}/v1/requests/{request[0]}").json()
        assert shown["requests"][0]["status"] == request[1] == "running"


def test_all_engines_are_shown_through_any_api_process(tmp_path):
    """Each time a new connection, which either process may take."""
    engines = (EngineSpec(0), EngineSpec(1))
    stub = {"step_seconds": 0.05, "max_model_len": 1_000_000}
    model = write_folder(tmp_path, byte_level_tokenizer(), config={"stub": stub})
    with start_server(EngineConfig(model=str(model)), engines=engines, api_server_count=2) as server:
        url, body = server.url, {"prompt": "one two three four five", "max_tokens": 100_000, "stream": True}
        with server.http.stream("POST", f"{url}/v1/completions", json=body):
            for _ in range(6):
                with httpx.stream("GET", f"{url}/live", timeout=30) as reply:
                    seen, running = set(), 0
                    for frame in frames(reply):
                        seen.add(frame["engine"])
                        running += len(frame.get("requests") or ())
                        if seen == {0, 1} and running:
                            break
                    assert seen == {0, 1} and running, "the stream ended before it had shown both"


def test_a_viewer_does_not_hold_up_the_end_of_the_server(stub_model):
    with start_server(EngineConfig(model=str(stub_model)), shutdown_timeout=600.0) as server:
        with server.http.stream("GET", f"{server.url}/live") as reply:
            found = frames(reply)
            next(found)
            server.process.send_signal(signal.SIGINT)
            for _ in found:
                pass
        assert server.wait_for_end(60) == 0


def test_open_requests_are_listed(slow_echo):
    http, url = slow_echo.http, slow_echo.url
    slow_echo.wait_until_unused()
    assert http.get(f"{url}/v1/requests").json() == {"object": "list", "data": [], "num_requests": 0}
    body = {"prompt": "one two three four five", "max_tokens": 100_000, "stream": True}
    with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: httpx closes the stream of an iterator that nobody holds
        next(lines)
        listed = http.get(f"{url}/v1/requests").json()
        (request,) = listed["data"]
        assert listed["num_requests"] == 1
        assert request["slack"] is None
        assert (request["engine"], request["status"], request["phase"], request["row"]) == (0, "running", "decode", 0)
        assert http.get(f"{url}/v1/requests/{request['id']}").json()["requests"][0]["status"] == "running"
    assert httpx.get(f"{url}/v1/requests").status_code == 401


def test_slack_is_the_time_until_the_timeout_of_a_request(slow_echo):
    http, url = slow_echo.http, slow_echo.url
    body = {"prompt": "one two three four five", "max_tokens": 100_000, "stream": True, "timeout": 500}
    with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: httpx closes the stream of an iterator that nobody holds
        next(lines)
        (first,) = http.get(f"{url}/v1/requests").json()["data"]
        slow_echo.wait_for(lambda: http.get(f"{url}/v1/requests").json()["data"][0]["slack"] < first["slack"])
    assert 0 < first["slack"] <= 500 and 0 < first["num_left_tokens"] < 100_000


def test_several_keys_see_no_prefixes_and_no_slots_since_they_share_them(stub_model):
    with start_server(EngineConfig(model=str(stub_model)), api_key=("one", "two")) as server:
        key = {"Authorization": "Bearer one"}
        replies = [
            httpx.get(f"{server.url}/engines/0/prefixes/0", headers=key),
            httpx.post(f"{server.url}/slots/0?action=restore", headers=key, json={"filename": "another's"}),
        ]
    assert [reply.status_code for reply in replies] == [403, 403]
    assert all("several keys" in reply.json()["error"]["message"] for reply in replies)
