"""Several models of which not all fit: swaps, streams, deaths, and nobody notices but by the clock."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.serving.models.conftest import NAMES
from tests.serving.models.many_models import descendants, is_alive, many_models

ONE, TWO, ALL = "200MiB", "400MiB", "2GiB"
MOST_TOKENS = 100_000
PROMPT = "the mill grinds what comes to it"


@pytest.fixture(scope="module")
def undisturbed(models_folder):
    """The answers of models that are never unloaded, by model and prompt."""
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    with many_models("--models-dir", str(models_folder), "--models-memory", ALL) as server:
        answers = {
            (name, prompt): server.complete(name, prompt).json()["choices"] for name in NAMES for prompt in prompts
        }
        assert [server.loads(name) for name in NAMES] == [1, 1, 1]
        assert [server.state(name) for name in NAMES] == ["ready"] * 3
    return answers


@pytest.fixture(scope="module")
def server(models_folder):
    """A server with room for one model at a time."""
    with many_models("--models-dir", str(models_folder), "--models-memory", ONE) as server:
        yield server


def test_swapped_models_answer_as_if_they_had_never_left(server, undisturbed, rng):
    asked = [key for key in undisturbed for _ in range(2)]
    rng.shuffle(asked)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda key: server.complete(*key), asked))
    assert [reply.status_code for reply in replies] == [200] * len(asked)
    assert [reply.json()["choices"] for reply in replies] == [undisturbed[key] for key in asked]
    assert sum(server.state(name) == "ready" for name in NAMES) == 1
    # Requests that wait for one model share its load.
    assert sum(server.loads(name) for name in NAMES) < len(asked)


def test_a_stream_ends_before_its_model_leaves_and_who_waits_sees_why(server):
    server.complete("ant", PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    others: list[str] = []

    def wait_for_bee() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={"model": "bee", **body}, timeout=120) as reply:
            others.extend(reply.iter_lines())

    with httpx.stream("POST", f"{server.url}/v1/completions", json={"model": "ant", **body}, timeout=120) as reply:
        lines = reply.iter_lines()
        next(lines)
        beside = threading.Thread(target=wait_for_bee)
        beside.start()
        looks: list[dict] = []

        def bee_waits() -> bool:
            looks.append(server.cards())
            return looks[-1]["bee"]["num_waiting"] == 1

        server.wait_for(bee_waits)
        assert looks[-1]["ant"]["state"] != "ready", "all may be written by now, though nobody has read it"
        texts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    beside.join()
    assert texts[-1]["choices"][0]["finish_reason"] == "length"
    chunks = [json.loads(line[6:]) for line in others if line.startswith("data: {")]
    assert chunks, (others, server.output()[-3000:])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("error" not in chunk for chunk in chunks)


def test_a_model_that_is_killed_is_started_again_and_the_request_is_answered(server, undisturbed):
    key = ("cat", f"{PROMPT} 0")
    assert server.complete(*key).json()["choices"] == undisturbed[key]
    pid, loads = server.server_of("cat"), server.loads("cat")
    tree = [pid, *descendants(pid)]
    assert len(tree) == 2, "it and its engine"
    os.kill(pid, signal.SIGKILL)
    reply = server.complete(*key)
    assert (reply.status_code, reply.json()["choices"]) == (200, undisturbed[key])
    assert server.loads("cat") == loads + 1
    assert 'tokenmill:model_deaths_total{model="cat"} 1.0' in server.get("/metrics").text
    server.wait_for(lambda: not [one for one in tree if is_alive(one)])


def test_a_stream_whose_model_is_killed_ends_with_an_error(models_folder, tmp_path):
    """One of a model whose answers are longer than any test."""
    make_checkpoint(tmp_path / "ant", "qwen3", max_position_embeddings=MOST_TOKENS)
    (tmp_path / "bee").symlink_to(models_folder / "bee")
    body = {"model": "ant", "prompt": PROMPT, "max_tokens": MOST_TOKENS // 2, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    with many_models("--models-dir", str(tmp_path), "--models-memory", ONE) as server:
        server.complete("ant", PROMPT)
        pid = server.server_of("ant")
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGKILL)
            events = [line for line in lines if line.startswith("data: ")]
        assert "error" in json.loads(events[-2][6:])
        assert server.complete("bee", PROMPT).status_code == 200


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(models_folder):
    with many_models("--models-dir", str(models_folder), "--models-memory", "100MiB") as server:
        reply = server.complete("ant", PROMPT)
        assert reply.status_code == 400
        assert "160.2 MiB" in reply.json()["error"]["message"] and "100.0 MiB" in reply.json()["error"]["message"]
        assert server.loads("ant") == 0


def test_the_kv_of_a_model_that_left_is_found_on_the_disk(models_folder, tmp_path):
    prompt = list(range(10, 250))
    flags = ("--models-dir", str(models_folder), "--models-memory", ONE, "--kv-disk", str(tmp_path / "kv"))
    with many_models(*flags) as server:
        first = server.complete("ant", prompt).json()
        history = [*prompt, 20, 21, 22]
        assert server.complete("bee", prompt).json()["choices"] != first["choices"]
        assert server.loads("ant") == 1
        again = server.complete("ant", prompt).json()
        assert (server.loads("ant"), again["choices"]) == (2, first["choices"])
        # All full pages of 16 tokens; the last token of a prompt is always run.
        assert cached(again) == (len(prompt) - 1) // 16 * 16
        server.complete("bee", prompt)
        assert cached(server.complete("ant", history).json()) == len(prompt)
        assert len(list((tmp_path / "kv").iterdir())) == 2, "each has a folder of its own"


def test_of_a_conversation_nothing_but_the_rest_of_a_page_is_computed_twice_by_swaps(models_folder, tmp_path, rng):
    """From its first page on: what is too short to be stored when a request ends is stored before the model leaves."""
    flags = ("--models-dir", str(models_folder), "--models-memory", ONE, "--kv-disk", str(tmp_path / "kv"))
    with many_models(*flags) as server:
        told: dict[str, list[int]] = {"ant": [], "bee": []}
        for _ in range(5):
            for name, before in told.items():
                prompt = [*before, *rng.integers(10, 300, rng.integers(2, 30)).tolist()]
                reply = server.complete(name, prompt, return_token_ids=True).json()
                # The last token of an answer was not run.
                assert cached(reply) == max(0, len(before) - 1) // 16 * 16, (name, len(before))
                told[name] = [*prompt, *reply["choices"][0]["token_ids"]]
        assert [server.loads(name) for name in told] == [5, 5]


def cached(reply) -> int:
    return (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def test_nothing_is_left_when_the_server_of_all_is_killed(models_folder):
    with many_models("--models-dir", str(models_folder), "--models-memory", TWO) as server:
        server.complete("ant", PROMPT)
        server.complete("bee", PROMPT)
        pids = server.pids()
        assert len(pids) >= 4
        server.process.kill()
        server.process.wait()
        server.wait_for(lambda: not [pid for pid in pids if is_alive(pid)])
        server.wait_for(lambda: list(server.private.iterdir()) == [])


def test_models_sleep_where_that_is_enough_and_wake_without_a_load(models_folder, undisturbed, tmp_path):
    flags = ("--models-memory", "900MiB", "--kv-cache-memory-bytes", "256MiB", "--kv-disk", str(tmp_path / "kv"))
    with many_models("--models-dir", str(models_folder), *flags) as server:
        prompt, histories = list(range(10, 250)), {}
        for name in NAMES:
            histories[name] = [
                *prompt,
                *server.complete(name, prompt, return_token_ids=True).json()["choices"][0]["token_ids"],
            ]
        assert "sleeping" in [server.state(name) for name in NAMES]
        for name in (*NAMES, *reversed(NAMES)):
            answer = server.complete(name, histories[name], max_tokens=1).json()
            assert cached(answer) == (len(histories[name]) - 1) // 16 * 16, "it was stored before it slept"
        for name, text in undisturbed:
            assert server.complete(name, text).json()["choices"] == undisturbed[name, text]
        assert [server.loads(name) for name in NAMES] == [1, 1, 1], server.get("/metrics").text
        asleep = next(name for name in NAMES if server.state(name) == "sleeping")
        assert server.get(f"/health?model={asleep}").status_code == 200
        assert own_bytes(server.server_of(asleep)) < 200 << 20, "its KV is given back"
        server.post("/models/unload", {"model": asleep})
        server.wait_for(lambda: server.state(asleep) == "unloaded")


def own_bytes(pid: int) -> int:
    """Bytes of a process and of those below it that are not mapped from files."""
    status = [Path(f"/proc/{one}/status").read_text() for one in (pid, *descendants(pid))]
    return sum(int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) << 10 for text in status)
