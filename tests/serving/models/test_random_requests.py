"""Random requests at random models of which not all fit, with kills among them: each answer is the undisturbed one.

`make test` sends some hundred, `make nightly` ten thousand.
"""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.seeding import seed_for
from tests.serving.models.conftest import NAMES
from tests.serving.models.many_models import ManyModels, descendants, many_models
from tests.tiers import tier

NUM_REQUESTS, NUM_CLIENTS = (10_000, 12) if tier() == "nightly" else (60, 6)
LONGEST = 48
# Three deaths of a server within a minute are too many, and so are those of an engine.
KILL_SECONDS = 45.0
SEED = seed_for(__name__)


def body_of(model: str, prompt: list[int], length: int) -> dict:
    params = {"max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt, **params}


@pytest.mark.timeout(7200)
def test_every_answer_is_the_undisturbed_one(models_folder, tmp_path):
    rng = random.Random(SEED)
    prompts = [[rng.randrange(10, 300) for _ in range(rng.randrange(1, 120))] for _ in range(6)]
    with many_models("--models-dir", str(models_folder), "--models-memory", "2GiB") as server:
        wanted = {
            (name, number): tokens_of(server.post("/v1/completions", body_of(name, prompt, LONGEST)).json())
            for name in NAMES
            for number, prompt in enumerate(prompts)
        }
    flags = ("--models-dir", str(models_folder), "--models-memory", "400MiB", "--kv-disk", str(tmp_path / "kv"))
    with many_models(*flags) as server, ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
        kills = Kills(server, random.Random(rng.random()))
        asked = [
            (rng.choice(NAMES), rng.randrange(len(prompts)), rng.randrange(1, LONGEST + 1), rng.random())
            for _ in range(NUM_REQUESTS)
        ]
        killer = pool.submit(kills.run)

        def ask(one) -> None:
            name, number, length, way = one
            body, tokens = body_of(name, prompts[number], length), wanted[name, number][:length]
            if way < 0.5:
                reply = server.post("/v1/completions", body)
                assert reply.status_code == 200, reply.text
                assert tokens_of(reply.json()) == tokens
            elif way < 0.9:
                check_stream(server, body, tokens, kills)
            else:
                leave_early(server, body)

        try:
            for done in [pool.submit(ask, one) for one in asked]:
                done.result()
        finally:
            kills.is_over = True
        killer.result()
        assert kills.num_kills > 0
        text = server.get("/metrics").text
        assert sum(server.loads(name) for name in NAMES) > 3, text


def tokens_of(reply: dict) -> list[int]:
    return reply["choices"][0]["token_ids"]


def check_stream(server: ManyModels, body: dict, tokens: list[int], kills: "Kills") -> None:
    found: list[int] = []
    began = time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=300) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    # What has been sent cannot be asked for again.
                    assert kills.has_killed_since(began), chunk
                    assert found == tokens[: len(found)]
                    return
                found += chunk["choices"][0].get("token_ids") or []
    assert found == tokens


def leave_early(server: ManyModels, body: dict) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=300) as reply:
        next(reply.iter_lines(), None)


class Kills:
    """Kills the server or the engine of a loaded model now and then."""

    def __init__(self, server: ManyModels, rng: random.Random, names: Sequence[str] = NAMES) -> None:
        self.server = server
        self.rng = rng
        self.names = names
        self.is_over = False
        self.num_kills = 0
        self.last = 0.0
        self.last_of: dict[str, float] = {}

    def has_killed_since(self, moment: float, name: str = "") -> bool:
        """Return True if a model, or the one of this name, was killed since."""
        last = self.last_of.get(name, 0.0) if name else self.last
        return last > moment - 10.0  # a death is felt for a moment

    def run(self) -> None:
        while not self.is_over:
            time.sleep(0.1)
            ready = [name for name in self.names if self.server.state(name) == "ready"]
            if time.monotonic() - self.last > KILL_SECONDS and ready:
                self.kill(self.rng.choice(ready))

    def kill(self, name: str) -> None:
        try:
            pid = self.server.server_of(name)
        except (AssertionError, httpx.HTTPError):
            return  # it has left meanwhile
        self.last = self.last_of[name] = time.monotonic()
        os.kill(self.rng.choice([pid, *descendants(pid)]), signal.SIGKILL)
        self.num_kills += 1
