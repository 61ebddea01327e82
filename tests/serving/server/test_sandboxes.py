"""Sandboxes of grammars and images are killed and stopped: no client is blamed, and nobody beside them notices."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.serving.server.running_server import RunningServer, children_of, start_server
from tests.vision_checkpoints import make_vision_checkpoint
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
GRAMMARS, IMAGES = "tokenmill.model.structured.trial", "tokenmill.model.vision.decoding"
IMPOSSIBLE = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = make_vision_checkpoint(tmp_path_factory.mktemp("models") / "vision")
    engine = EngineConfig(model=str(model), dtype="float32", num_pages=300, max_num_seqs=8)
    with start_server(engine, ENGINE_MODULE, served_model_name=("tiny",)) as running:
        yield running


def sandboxes(server: RunningServer, module: str) -> dict[int, list[int]]:
    """The processes of this kind, below engines and text workers, and the forks of each."""
    parents = server.children().values()
    commands = {pid: command for parent in parents for pid, command in children_of(parent).items()}
    return {pid: list(children_of(pid)) for pid, command in commands.items() if module in command}


def signal_to(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def image_of(noise: np.random.Generator, size: int = 96) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(noise.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "hello"}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6} | fields


def with_schema(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return chat(structured_outputs={"json": schema}, **fields)


def new_schema(noise: np.random.Generator) -> dict[str, Any]:
    """One that the server has not had yet."""
    return {"enum": noise.integers(0, 2**62, 3).tolist()}


def post(server: RunningServer, body: dict[str, Any]) -> httpx.Response:
    return server.post("/v1/chat/completions", body)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_next_schema_and_the_next_image_are_answered(
    server: RunningServer,
    rng: np.random.Generator,
    number: int,
) -> None:
    for module, body in (
        (GRAMMARS, lambda: with_schema(new_schema(rng))),
        (IMAGES, lambda: chat(image_of(rng, 4))),
        (IMAGES, lambda: chat(image_of(rng, 200))),
    ):
        assert post(server, body()).status_code == 200
        before = sandboxes(server, module)
        assert before
        for pid in before:
            signal_to(pid, number)
        answer = post(server, body())
        assert answer.status_code == 200, answer.text
        server.wait_for(lambda module=module, before=before: not set(before) & set(sandboxes(server, module)))


def test_a_fault_of_a_grammars_own_is_told_each_time(server: RunningServer) -> None:
    answers = [post(server, with_schema(IMPOSSIBLE)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [400, 400, 400]
    assert len({answer.json()["error"]["message"] for answer in answers}) == 1
    assert post(server, with_schema({"enum": ["possible"]})).status_code == 200


@pytest.mark.parametrize("module", [GRAMMARS, IMAGES])
def test_what_cannot_be_tried_is_503_and_can_be_asked_again(
    server: RunningServer,
    rng: np.random.Generator,
    module: str,
) -> None:
    ended = threading.Event()

    def attack() -> None:
        while not ended.wait(0.01):
            for pid in sandboxes(server, module):
                signal_to(pid, signal.SIGKILL)

    def ask() -> tuple[dict[str, Any], httpx.Response]:
        body = with_schema(new_schema(rng)) if module == GRAMMARS else chat(image_of(rng))
        return body, post(server, body)

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        body, answer = ask()
        while answer.status_code == 200:  # a process may live long enough to answer
            body, answer = ask()
    finally:
        ended.set()
        attacker.join()
    assert answer.status_code == 503, answer.text
    assert answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["code"] == "server_busy"
    assert post(server, body).status_code == 200


def test_signals_at_random_moments_end_no_stream(
    server: RunningServer,
    rng: np.random.Generator,
) -> None:
    ended = threading.Event()
    chance = random.Random(int(rng.integers(2**32)))
    streamed = chat(max_tokens=60, temperature=0, ignore_eos=True)
    alone = post(server, streamed).json()["choices"][0]["message"]["content"]

    def attack() -> None:
        while not ended.wait(chance.uniform(0.0, 0.5)):
            found = sandboxes(server, chance.choice([GRAMMARS, IMAGES]))
            victims = [*found, *(fork for forks in found.values() for fork in forks)]
            if victims:
                signal_to(chance.choice(victims), chance.choice(SIGNALS))

    def stream(_: int) -> str:
        text = ""
        for chunk in server.client.chat.completions.create(
            model="tiny",
            messages=streamed["messages"],
            stream=True,
            max_tokens=60,
            temperature=0,
            extra_body={"ignore_eos": True},
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        return text

    bodies = [chat(image_of(rng, size)) for size in (4, 96, 300, 8, 64)]
    bodies += [with_schema(new_schema(rng)) for _ in range(5)]
    chance.shuffle(bodies)
    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        with ThreadPoolExecutor(6) as threads:
            texts = threads.map(stream, range(6))
            statuses = list(threads.map(lambda body: post(server, body).status_code, bodies))
            assert set(texts) == {alone}
    finally:
        ended.set()
        attacker.join()
    print(statuses)
    assert set(statuses) <= {200, 503}
    assert post(server, chat(image_of(rng))).status_code == 200
    assert post(server, with_schema(new_schema(rng))).status_code == 200
    assert post(server, with_schema(IMPOSSIBLE)).status_code == 400
    server.wait_until_unused()


def test_sandboxes_end_with_an_engine_and_a_worker_that_are_killed(
    server: RunningServer,
    rng: np.random.Generator,
) -> None:
    for module, name in ((GRAMMARS, "engine_process"), (IMAGES, "frontend.worker")):
        assert post(server, chat(image_of(rng), structured_outputs={"json": new_schema(rng)})).status_code == 200
        pids = sandboxes(server, module)
        assert pids
        (parent,) = [pid for called, pid in server.children().items() if name in called]
        os.kill(parent, signal.SIGKILL)
        server.wait_for(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        server.wait_for(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200)
        answer = post(server, chat(image_of(rng), structured_outputs={"json": new_schema(rng)}))
        assert answer.status_code == 200, answer.text
