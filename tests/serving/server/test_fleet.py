"""Engines come and go while a server runs, and others with new weights take their place: no request notices."""

import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import patience
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

BODY = {"prompt": [5, 6, 7], "max_tokens": 120, "temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "other", "qwen3", seed=11)


@pytest.fixture(scope="module")
def server(tiny_checkpoint):
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=400, max_num_seqs=8)
    with start_server(engine, ENGINE_MODULE) as running:
        yield running


def completion(server, **fields) -> dict:
    reply = httpx.post(f"{server.url}/v1/completions", json=BODY | fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@contextlib.contextmanager
def streamed_text(server, **fields) -> Iterator[Iterator[str]]:
    """The deltas of an answer: when there is one, the request runs."""
    body = BODY | fields | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        events = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))
        yield (event["choices"][0]["text"] for event in events if event["choices"])


def post(server, path: str, body=None, **query) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, params=query, timeout=patience())


def engines(server) -> dict[int, str]:
    return {one["engine"]: one["status"] for one in server.http.get(f"{server.url}/engines").json()["engines"]}


def wait_for_engines(server, wanted: dict[int, str]) -> None:
    server.wait_for(lambda: engines(server) == wanted)


def test_an_engine_is_added_drained_and_removed_and_requests_go_on(server):
    alone = completion(server)["choices"]
    assert post(server, "/engines/0/drain").status_code == 409, "somebody must take requests"
    assert post(server, "/engines/add").json() == {"engine": 1}
    assert engines(server) == {0: "ready", 1: "ready"}
    all_run = threading.Barrier(9)

    def stream(number: int) -> str:
        with streamed_text(server, max_tokens=400, seed=number) as parts:
            first = next(parts)
            all_run.wait(patience())
            return first + "".join(parts)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(stream, number) for number in range(8)]
        all_run.wait(patience())
        # At once: what engine 0 has goes on at the other.
        assert post(server, "/engines/0/remove", timeout=0).status_code == 200
        wait_for_engines(server, {1: "ready"})
        texts = [call.result() for call in calls]
    assert texts == [completion(server, max_tokens=400, seed=number)["choices"][0]["text"] for number in range(8)]
    assert completion(server)["choices"] == alone
    assert server.http.get(f"{server.url}/health").status_code == 200
    assert post(server, "/engines/7/remove").status_code == 404
    assert post(server, "/engines/add").json() == {"engine": 0}, "the lowest index that nobody has"
    assert post(server, "/engines/1/remove").status_code == 200
    wait_for_engines(server, {0: "ready"})
    server.wait_until_unused()


def test_streams_end_with_the_weights_they_began_with(server, tiny_checkpoint, other_checkpoint):
    before = completion(server, max_tokens=450)
    (old,) = engines(server)
    with streamed_text(server, max_tokens=450) as parts:
        text = next(parts)
        reply = post(server, "/update_weights_from_disk", {"model_path": str(other_checkpoint)})
        assert reply.status_code == 200 and reply.json()["success"], reply.text
        after = completion(server, max_tokens=450)
        assert text + "".join(parts) == before["choices"][0]["text"]
    assert after["choices"] != before["choices"]
    assert after["system_fingerprint"] == reply.json()["system_fingerprint"] != before["system_fingerprint"]
    wait_for_engines(server, {1 - old: "ready"})
    info = server.http.get(f"{server.url}/server_info").json()
    assert info["engine"]["fingerprint"] == info["engines"][0]["fingerprint"]
    assert completion(server, max_tokens=450)["choices"] == after["choices"]
    assert post(server, "/update_weights_from_disk", {"model_path": str(other_checkpoint)}).status_code == 400
    back = post(server, "/update_weights_from_disk", {"model_path": str(tiny_checkpoint)})
    assert back.json()["system_fingerprint"] == before["system_fingerprint"]
    wait_for_engines(server, {old: "ready"})
    assert completion(server, max_tokens=450)["choices"] == before["choices"]


def test_weights_that_cannot_be_served_are_refused_and_the_old_ones_stay(server, tmp_path):
    other = make_checkpoint(tmp_path / "llama", "llama")
    broken = make_checkpoint(tmp_path / "broken", "qwen3")
    (broken / "model.safetensors").write_bytes(b"no weights")
    cases = [
        (tmp_path / "nowhere", 400, "nothing at this path"),
        (broken, 409, "cannot be started"),
        (other, 400, "architecture"),
        ("a\0b", 400, "nothing at this path"),
    ]
    for path, status, word in cases:
        reply = post(server, "/update_weights_from_disk", {"model_path": str(path)})
        assert reply.status_code == status and word in reply.json()["error"]["message"], reply.text
        assert str(tmp_path) not in reply.text, "it names the file, and not where it lies"
        assert list(engines(server).values()) == ["ready"]
    assert completion(server)["choices"]
    assert server.http.get(f"{server.url}/health").status_code == 200
