"""Files and batches of a server of several models, as OpenAI's client uses them."""

import io
import json
import os
import signal

import httpx
import openai
import pytest

from tests.eventually import eventually
from tests.serving.models.many_models import many_models
from tokenmill.serving.batches.lines import line_seed
from tokenmill.serving.proxy.forward import passed_headers

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
KEYS = ("key-of-all", "key-of-ant")


@pytest.fixture(scope="module")
def server(models_folder, tmp_path_factory):
    """A server with room for one model at a time, and a key that may use one alone."""
    folder = tmp_path_factory.mktemp("batches")
    (folder / "keys.toml").write_text(f'"{KEYS[1]}" = ["ant"]\n')
    flags = ("--api-key", KEYS[0], "--api-key-models", str(folder / "keys.toml"), "--batch-dir", str(folder / "kept"))
    with many_models("--models-dir", str(models_folder), "--models-memory", "200MiB", *flags) as server:
        server.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        yield server


def client_of(server, key=KEYS[0]):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def start(client, bodies, url=TEXT):
    lines = [{"custom_id": f"line {n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    raw = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(raw)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


def end_of(server, client, batch):
    def ended():
        found = client.batches.retrieve(batch.id)
        return found if found.completed_at or found.failed_at else None

    return eventually(ended, server.output, seconds=120.0)


def lines_of(client, file_id) -> dict[str, dict]:
    return {line["custom_id"]: line for line in map(json.loads, client.files.content(file_id).text.splitlines())}


def bodies_of(model: str, rng, count: int = 6) -> list[dict]:
    drawn = rng.integers(10, 300, (count, 12)).tolist()
    return [{"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 1.0} for prompt in drawn]


def test_the_lines_of_several_batches_are_answered_by_the_models_that_they_name(server, rng):
    with client_of(server) as client:
        asked = {name: bodies_of(name, rng) for name in ("ant", "bee")}
        batches = {name: start(client, bodies) for name, bodies in asked.items()}
        for name, bodies in asked.items():
            batch = end_of(server, client, batches[name])
            assert (batch.status, batch.request_counts.completed) == ("completed", len(bodies)), server.output()[-3000:]
            output = lines_of(client, batch.output_file_id)
            for number, body in enumerate(bodies):
                # As a client would be answered, drawn with the line's own seed.
                seeded = body | {"seed": line_seed(batch.id, f"line {number}")}
                reply = server.post(TEXT, seeded).json()
                line = output[f"line {number}"]["response"]["body"]
                assert (line["model"], line["choices"]) == (name, reply["choices"])
    assert 'tokenmill:batch_lines_ended_total{outcome="completed"} 12.0' in server.get("/metrics").text


def test_a_line_of_another_keys_model_and_of_no_model_are_refused(server, rng):
    with client_of(server, KEYS[1]) as client:
        for name, status in (("bee", 403), ("cow", 404)):
            batch = end_of(server, client, start(client, bodies_of(name, rng, 2)))
            errors = lines_of(client, batch.error_file_id)
            assert [line["response"]["status_code"] for line in errors.values()] == [status] * 2
        others = client_of(server).batches.list().data
        assert batch.id not in [one.id for one in others], "each key sees its own"
        mine = end_of(server, client, start(client, bodies_of("ant", rng, 2)))
        assert mine.request_counts.completed == 2
        with pytest.raises(openai.NotFoundError):
            client_of(server).files.retrieve(mine.output_file_id)


def test_lines_wait_while_a_stream_of_another_model_runs(server, rng):
    body = {"model": "bee", "prompt": "the mill", "max_tokens": 480, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with client_of(server) as client, httpx.Client(headers=headers, timeout=120) as http:
        with http.stream("POST", f"{server.url}{TEXT}", json=body) as reply:
            parts = reply.iter_lines()
            next(parts)
            loads = server.loads("ant")
            batch = start(client, bodies_of("ant", rng, 2))
            left = [line for line in parts if line.startswith("data: {")]
        assert json.loads(left[-1][6:])["choices"][0]["finish_reason"] == "length"
        assert end_of(server, client, batch).request_counts.completed == 2
    assert server.loads("ant") == loads + 1


def test_a_client_cannot_say_that_its_request_is_a_line():
    """Else it would pass the limits of the queue; see `BatchMiddleware`."""
    assert passed_headers({"X-TokenMill-Batch": "batch_1", "x-a": "b"}) == {"x-a": "b"}


def test_a_line_whose_model_is_killed_is_answered_after_all(server, rng):
    with client_of(server) as client:
        bodies = [body | {"max_tokens": 300, "ignore_eos": True} for body in bodies_of("cat", rng, 3)]
        batch = start(client, bodies)
        server.wait_for(lambda: server.state("cat") == "ready")
        os.kill(server.server_of("cat"), signal.SIGKILL)
        ended = end_of(server, client, batch)
        assert (ended.status, ended.request_counts.completed) == ("completed", 3)
