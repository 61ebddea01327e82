"""The reports of a server of several models, and its routes to steer it; most of it wakes nothing."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import ollama
import openai
import pytest

from tests.eventually import patience
from tests.serving.models.conftest import NAMES
from tests.serving.models.many_models import many_models

PROMPT = "the mill grinds"
PRESETS = """
["*"]
ttl = "1h"

[ant]
aliases = ["small", "gpt-4o-mini"]
pinned = true
default = true
max-model-len = 256
sampling = {{ temperature = 0.0 }}

[bee]
group = "hands"

[cat]
group = "hands"

[dog]
model = "{elsewhere}"
max-num-seqs = 2
"""


@pytest.fixture(scope="module")
def server(models_folder, tmp_path_factory):
    presets = tmp_path_factory.mktemp("presets") / "models.toml"
    presets.write_text(PRESETS.format(elsewhere=models_folder / "bee"))
    flags = ("--models-dir", str(models_folder), "--models", str(presets), "--models-memory", "600MiB")
    with many_models(*flags) as server:
        server.wait_for(lambda: server.state("ant") == "ready")
        yield server


def test_all_models_are_listed_with_what_is_known_of_them(server):
    cards = server.cards()
    assert list(cards) == [*NAMES, "dog"]
    ant = cards["ant"]
    assert (ant["state"], ant["pinned"], ant["aliases"]) == ("ready", True, ["small", "gpt-4o-mini"])
    assert (ant["max_model_len"], cards["dog"]["max_model_len"]) == (256, 512)
    assert ant["size"] > 100_000 and ant["memory"] > 160 << 20
    assert ant["capabilities"] == ["completion"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == list(cards)
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="this server has ant, bee, cat, dog"):
        client.models.retrieve("cow")


def test_a_request_without_a_model_goes_to_the_default_and_an_alias_to_its_model(server):
    first = server.complete(None, PROMPT, temperature=None).json()
    assert first["model"] == "ant"
    assert server.complete("gpt-4o-mini", PROMPT).json()["choices"] == first["choices"], "the preset's temperature is 0"
    assert server.complete("ant:latest", PROMPT).json()["choices"] == first["choices"]
    assert server.get("/server_info?model=ant").json()["default_sampling"]["temperature"] == 0.0


def test_health_lists_and_metrics_wake_nothing(server):
    for path in ("/health", "/livez", "/readyz", "/ping"):
        assert server.get(path).status_code == server.http.head(server.url + path).status_code == 200
    before = {name: server.loads(name) for name in server.cards()}
    for path in ("/health", "/v1/models", "/v1/models/dog", "/models", "/metrics", "/api/tags", "/api/ps", "/version"):
        assert server.get(path).status_code == 200, path
    assert server.get("/health?model=ant").status_code == 200
    assert server.get("/health?model=dog").status_code == 503
    assert server.get("/server_info?model=dog").status_code == 503
    assert server.post("/reset_prefix_cache?model=dog").status_code == 503
    assert server.post("/api/show", {"model": "dog"}).status_code == 200
    assert server.post("/reset_prefix_cache?model=ant").json() == {"status": "reset"}
    assert {name: server.loads(name) for name in server.cards()} == before
    idle = 'tokenmill:num_requests_running{engine="0",model="ant"} 0.0'
    server.wait_for(lambda: idle in server.get("/metrics").text)


def test_models_are_loaded_and_unloaded_as_by_llama_cpp(server):
    def status(name):
        return {card["id"]: card for card in server.get("/models").json()["data"]}[name]["status"]["value"]

    assert server.post("/models/load", {"model": "bee"}).json() == {"success": True}
    server.wait_for(lambda: status("bee") == "loaded")
    assert server.post("/models/cat/load").json() == {"success": True}
    server.wait_for(lambda: status("cat") == "loaded")
    assert status("bee") == "unloaded", "of a group only one is loaded"
    assert status("ant") == "loaded"
    assert server.post("/models/cat/unload").json() == {"success": True}
    server.wait_for(lambda: status("cat") == "unloaded")
    assert server.post("/models/unload", {"model": "cow"}).status_code == 404


def test_ollamas_client_finds_all_models_and_says_how_long_they_stay(server):
    client = ollama.Client(host=server.url, timeout=120)
    assert {model.model for model in client.list().models} >= {"ant:latest", "small:latest", "dog:latest"}
    assert client.show("dog").modelinfo["qwen3.context_length"] == 512
    reply = client.generate("dog", PROMPT, options={"num_predict": 4}, keep_alive="5m")
    assert reply.eval_count == 4
    running = {model.model: model for model in client.ps().models}
    assert running["dog:latest"].expires_at.year < 2100 < running["ant:latest"].expires_at.year
    assert client.show("dog").capabilities == ["completion"], "its own server says it"
    assert client.generate("dog", "", keep_alive=0).done_reason == "unload"
    server.wait_for(lambda: server.state("dog") == "unloaded")
    assert client.generate("dog", "").done_reason == "load"
    assert server.state("dog") == "ready"
    with pytest.raises(ollama.ResponseError, match="not found") as refused:
        client.chat("cow", [{"role": "user", "content": "moo"}])
    assert refused.value.status_code == 404


def test_a_model_leaves_when_its_time_is_over(server):
    reply = server.complete("dog", PROMPT, ttl=0.5)
    assert reply.status_code == 200
    assert "ttl" not in reply.headers.get("x-tokenmill-ignored", ""), "it is heeded"
    server.wait_for(lambda: server.state("dog") == "unloaded")
    assert server.complete("dog", PROMPT, keep_alive="soon").status_code == 400


def test_one_request_and_one_answer_are_found_where_they_are(server):
    made = server.post("/v1/responses", {"model": "ant", "input": "hello", "max_output_tokens": 4}).json()
    found = server.get(f"/v1/responses/{made['id']}")
    assert (found.status_code, found.json()["id"]) == (200, made["id"])
    assert server.get("/v1/responses/resp_none").status_code == 404
    assert server.get("/v1/requests/none").status_code == 404
    refused = server.get("/v1/batches")
    assert (refused.status_code, "--batch-dir" in refused.text) == (404, True)


def test_a_stream_that_waits_gets_signs_of_life_with_the_reason(server):
    body = {"model": "cat", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    server.post("/models/unload", {"model": "cat"})
    server.wait_for(lambda: server.state("cat") == "unloaded")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as reply:
        assert reply.status_code == 200
        lines = list(reply.iter_lines())
    assert lines[-2] == "data: [DONE]"
    for line in lines:
        assert not line.startswith(":") or "model cat" in line
    broken = {**body, "temperature": -1.0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=broken, timeout=120) as reply:
        assert reply.status_code == 400
        assert json.loads(reply.read())["error"]["param"] == "temperature"


def test_bodies_that_are_no_json_and_names_that_are_no_texts_load_nothing(server):
    before = {name: server.loads(name) for name in server.cards()}
    assert (
        server.http.post(
            f"{server.url}/v1/completions", content=b"{", headers={"content-type": "application/json"}
        ).status_code
        == 400
    )
    assert server.post("/v1/completions", {"model": 5, "prompt": "x"}).status_code == 400
    assert {name: server.loads(name) for name in server.cards()} == before


def test_a_folder_that_cannot_be_served_says_why_in_the_list(tmp_path, models_folder):
    (tmp_path / "ant").symlink_to(models_folder / "ant")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["Nobody"]}')
    (broken / "model.safetensors").write_bytes(b"")
    (tmp_path / "eight.gguf").write_bytes(b"GGUF1234")
    with many_models("--models-dir", str(tmp_path), "--models-memory", "1GiB") as server:
        cards = server.cards()
        assert {name: card["state"] for name, card in cards.items()} == {
            "ant": "unloaded",
            "broken": "failed",
            "eight": "failed",
        }
        assert "Nobody" in cards["broken"]["problem"]
        reply = server.complete("broken", PROMPT)
        assert (reply.status_code, "Nobody" in reply.json()["error"]["message"]) == (503, True)
        assert server.complete("ant", PROMPT).status_code == 200


def test_new_models_are_found_when_they_are_looked_for(tmp_path, models_folder):
    (tmp_path / "ant").symlink_to(models_folder / "ant")
    with many_models("--models-dir", str(tmp_path), "--models-memory", "1GiB") as server:
        assert server.complete(None, PROMPT).json()["model"] == "ant", "the only one"
        (tmp_path / "bee").symlink_to(models_folder / "bee")
        assert len(server.get("/models").json()["data"]) == 1
        assert len(server.get("/models?reload=1").json()["data"]) == 2
        assert server.complete("bee", PROMPT).status_code == 200
        (tmp_path / "ant").unlink()
        # What is gone is listed until its server has left.
        server.wait_for(lambda: [one["id"] for one in server.get("/models?reload=1").json()["data"]] == ["bee"])
        assert server.complete("ant", PROMPT).status_code == 404
        assert server.loads("bee") == 1


def test_a_stored_response_outlives_its_model(server):
    asked = {"input": "hello", "max_output_tokens": 4}
    made, other = (server.post("/v1/responses", {"model": name} | asked).json() for name in ("ant", "bee"))
    for name in ("ant", "bee"):
        server.post(f"/models/{name}/unload", {})
        server.wait_for(lambda name=name: server.state(name) == "unloaded")
    found = server.get(f"/v1/responses/{made['id']}").json()
    assert (found["id"], found["output"]) == (made["id"], made["output"])
    assert server.state("ant") == "unloaded", "nothing is loaded to show it"
    goes_on = server.post("/v1/responses", {"model": "ant", "previous_response_id": made["id"]} | asked).json()
    assert goes_on["usage"]["input_tokens"] > made["usage"]["input_tokens"]
    for one in (made, other):
        assert server.http.delete(f"{server.url}/v1/responses/{one['id']}").json()["deleted"] is True
        assert server.get(f"/v1/responses/{one['id']}").status_code == 404
        assert server.http.delete(f"{server.url}/v1/responses/{one['id']}").status_code == 404


def test_keys_are_asked_for_and_each_has_its_own_answers(models_folder):
    flags = ("--models-dir", str(models_folder), "--models-memory", "1GiB", "--api-key", "one", "--api-key", "two")
    with many_models(*flags) as server:
        assert server.complete("ant", PROMPT).status_code == 401
        assert server.get("/v1/models").status_code == 401
        assert server.get("/health").status_code == 200
        server.http.headers["authorization"] = "Bearer one"
        made = server.post("/v1/responses", {"model": "ant", "input": "hello", "max_output_tokens": 4}).json()
        assert server.get(f"/v1/responses/{made['id']}").status_code == 200
        assert 'model="ant"' in server.get("/metrics").text
        server.http.headers["authorization"] = "Bearer two"
        assert server.get(f"/v1/responses/{made['id']}").status_code == 404


def test_a_key_may_use_its_own_models_only(models_folder, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('"few" = ["ant", "gone"]\n"boss" = ["*"]\n')
    flags = ("--models-dir", str(models_folder), "--models-memory", "1GiB", "--api-key", "all")
    with many_models(*flags, "--api-key-models", str(keys)) as server:
        for key in ("all", "boss"):
            server.http.headers["authorization"] = f"Bearer {key}"
            assert sorted(server.cards()) == list(NAMES)
        assert server.complete("bee", PROMPT).status_code == 200
        assert server.complete(None, PROMPT).json()["model"] == "bee", "the one used last"
        server.http.headers["authorization"] = "Bearer few"
        assert sorted(server.cards()) == ["ant"]
        assert [one["name"] for one in server.get("/api/tags").json()["models"]] == ["ant:latest"]
        assert server.get("/api/ps").json()["models"] == []
        assert "bee" not in server.get("/metrics").text
        refused = [
            server.complete("bee", PROMPT),
            server.get("/v1/models/bee"),
            server.get("/props?model=bee"),
            server.post("/models/unload", {"model": "bee"}),
            server.post("/models/bee/load"),
            server.post("/reset_prefix_cache?model=bee"),
            server.post("/api/show", {"model": "bee:latest"}),
            server.post("/api/chat", {"model": "bee", "messages": []}),
        ]
        assert [reply.status_code for reply in refused] == [403] * len(refused)
        error = refused[0].json()["error"]
        assert error["message"] == "this API key may not use model bee: it may use ant"
        assert server.complete("dog", PROMPT).status_code == 404
        assert server.get("/props").status_code == 503, "the one used last is another key's"
        assert server.complete(None, PROMPT).json()["model"] == "ant"
        assert server.complete("ant", PROMPT).status_code == 200
        assert server.get("/props").status_code == 200


def test_open_streams_end_before_the_server_does_and_who_waits_is_told(models_folder):
    flags = ("--models-dir", str(models_folder), "--models-memory", "200MiB", "--shutdown-timeout", "60")
    body = {"model": "ant", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    with many_models(*flags) as server, ThreadPoolExecutor(1) as pool:
        server.complete("ant", PROMPT)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as reply:
            lines = reply.iter_lines()
            next(lines)
            late = pool.submit(server.complete, "bee", PROMPT)
            server.wait_for(lambda: server.cards()["bee"]["num_waiting"] == 1)
            server.process.send_signal(signal.SIGTERM)
            texts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert texts[-1]["choices"][0]["finish_reason"] == "length"
        assert late.result().status_code == 503
        assert server.process.wait(patience()) == 0


def test_the_page_finds_what_it_shows_though_nothing_is_loaded(models_folder):
    with many_models("--models-dir", str(models_folder), "--models-memory", "1GiB") as server:
        info = server.get("/server_info").json()
        assert (info["engine"]["model"], info["engine"]["max_model_len"]) == ("ant", 512)
        assert server.get("/").status_code == 200
        assert server.complete(None, PROMPT).status_code == 400, "none was used yet"
        assert [server.state(name) for name in NAMES] == ["unloaded"] * 3
