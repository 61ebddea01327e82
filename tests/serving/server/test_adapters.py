"""Adapters by their names over HTTP: chosen by `model`, listed, loaded and unloaded while requests run."""

import asyncio

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.model.adapters.trained import change_config, change_tensors, make_adapter
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

BODY = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "base", "qwen3", max_position_embeddings=8192)
    for number in range(4):
        make_adapter(base, folder / "loras" / f"a{number}", number)
    make_adapter(base, folder / "elsewhere", 9)
    (folder / "loras" / "link").symlink_to(folder / "elsewhere")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    engine = EngineConfig(
        model=str(folder / "base"),
        num_pages=600,
        max_num_seqs=4,
        enable_lora=True,
        max_loras=2,
        lora_modules=(f"pirate={folder / 'loras' / 'a0'}", f'{{"name": "poet", "path": "{folder / "loras" / "a1"}"}}'),
    )
    how = {"served_model_name": ("tiny",), "allow_runtime_lora": True, "lora_dir": str(folder / "loras"), "api_key": ()}
    with start_server(engine, ENGINE_MODULE, **how) as running:
        yield running


def choices(server, model, **fields):
    reply = server.post("/v1/completions", BODY | {"model": model} | fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"]


def load(server, name, path, **fields):
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)} | fields)


def test_the_model_of_a_request_names_the_base_or_an_adapter(server):
    answers = [choices(server, name) for name in ("tiny", "pirate", "poet")]
    assert len({answer[0]["text"] for answer in answers}) == 3
    assert [choices(server, name) for name in ("tiny", "pirate", "poet")] == answers
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4, "temperature": 0}),
        ("/v1/embeddings", {"input": "hello"}),
    ):
        replies = [server.post(path, body | {"model": name}).json() for name in ("tiny", "pirate")]
        assert [reply["model"] for reply in replies] == ["tiny", "pirate"], path
        parts = ("choices", "content", "output", "data")
        shown = [str([reply.get(part) for part in parts if part != "output"]) for reply in replies]
        assert shown[0] != shown[1] or path == "/v1/responses"
    assert server.post("/v1/completions", BODY | {"model": "nobody"}).status_code == 404


def test_models_lists_adapters_with_their_parent(server):
    cards = {card["id"]: card for card in server.http.get(f"{server.url}/v1/models").json()["data"]}
    assert cards["pirate"]["parent"] == cards["poet"]["parent"] == "tiny" and "parent" not in cards["tiny"]
    assert server.http.get(f"{server.url}/v1/models/pirate").json()["id"] == "pirate"


def test_a_request_shows_its_adapter_and_metrics_name_those_in_use(server):
    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = BODY | {"model": "pirate", "max_tokens": 6000, "request_id": "seen"}
            running = asyncio.ensure_future(client.post("/v1/completions", json=body))
            shown = set()
            while not running.done() and len(shown) < 2:
                reply = await client.get("/v1/requests/cmpl-seen")
                if reply.status_code == 200 and reply.json()["requests"][0].get("adapter") == "pirate":
                    shown.add("request")
                metrics = (await client.get("/metrics")).text
                if 'running_lora_adapters="pirate"' in metrics and 'max_lora="2"' in metrics:
                    shown.add("metrics")
            await client.post("/abort_requests", json={"abort_all": True})
            await running
            return shown

    assert asyncio.run(scenario()) == {"request", "metrics"}
    server.wait_until_unused()


def test_adapters_are_loaded_replaced_and_unloaded_while_requests_run(server, folder):
    pirate = choices(server, "pirate")
    assert load(server, "new", "a2").json()["rank"] == 4
    first = choices(server, "new")
    assert load(server, "new", "a3").status_code == 409
    assert load(server, "tiny", "a3").status_code == 409

    async def scenario():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            post = client.post
            names = ["pirate", "new", "poet", "tiny"]
            before = [asyncio.ensure_future(post("/v1/completions", json=BODY | {"model": name})) for name in names]
            # Whoever came before keeps what the name stood for, those after it get the other one.
            while not all(task.done() for task in before):
                await asyncio.sleep(0)
            body = {"lora_name": "new", "lora_path": "a3", "load_inplace": True}
            assert (await post("/v1/load_lora_adapter", json=body)).status_code == 200
            return [task.result().json()["choices"] for task in before]

    during = asyncio.run(scenario())
    assert during[:2] == [pirate, first]
    second = choices(server, "new")
    assert second != first
    change_tensors(folder / "loras" / "a3", lambda tensors: [tensor.mul_(-2) for tensor in tensors.values()])
    assert load(server, "new", "a3", load_inplace=True).status_code == 200
    assert choices(server, "new") not in (first, second)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "new"}).status_code == 200
    assert server.post("/v1/completions", BODY | {"model": "new"}).status_code == 404
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "new"}).status_code == 404


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "link", ".", "", "a\0b", "../loras/../elsewhere"])
def test_nothing_outside_of_the_folder_is_loaded(path, server):
    reply = load(server, "outside", path)
    assert reply.status_code == 400 and "lora_path" in reply.text, reply.text


def test_what_cannot_be_served_is_refused_with_the_reason(server, folder):
    broken = folder / "loras" / "a2"
    change_config(broken, use_dora=True)
    reply = load(server, "broken", "a2")
    assert reply.status_code == 400 and "use_dora is set, which is not supported" in reply.json()["error"]["message"]
    assert load(server, "a name with spaces", "a1").status_code == 400
    assert load(server, "x", "missing").status_code == 400


def test_without_the_flag_nothing_is_loaded(folder):
    engine = EngineConfig(model=str(folder / "base"), num_pages=100, max_num_seqs=4)
    with start_server(engine, ENGINE_MODULE, served_model_name=("tiny",), api_key=()) as server:
        reply = load(server, "x", folder / "loras" / "a1")
        assert reply.status_code == 409 and "--allow-runtime-lora" in reply.text
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 409
