"""Two engines with a real model: prefixes stay where they are, headers say where a call goes, and no death misleads."""

import concurrent.futures
import os
import random
import signal

import pytest

from tests.checkpoints import make_checkpoint
from tests.serving.server.running_server import start_server
from tests.serving.server.test_hangs import child
from tokenmill.config.configs import EngineConfig

ENGINE = "tokenmill.startup.assembly.engine_process"
VOCABULARY = 200


def serve(folder, num_engines: int, **how):
    config = EngineConfig(model=str(folder), device="cpu", num_pages=800, max_model_len=256, num_threads=1)
    return start_server(config, ENGINE, data_parallel_size=num_engines, **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def server(folder):
    with serve(folder, 2) as running:
        yield running


def prompts_with_shared_prefixes(seed: int) -> list[list[list[int]]]:
    """Six groups of five: as many cached tokens as they have beyond the first of each, where a group stays together.

    In threes of different groups: of two in one group at once, chance says whether the second finds what the first has.
    """
    rng = random.Random(seed)
    groups = [[rng.randrange(VOCABULARY) for _ in range(160)] for _ in range(6)]
    turns = [rng.sample(groups, 6) for _ in range(5)]
    prompts = [[group + [rng.randrange(VOCABULARY) for _ in range(8)] for group in turn] for turn in turns]
    return [turn[place : place + 3] for turn in prompts for place in (0, 3)]


def complete(server, prompt, **headers: str):
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return server.http.post(
        f"{server.url}/v1/completions",
        json=body,
        headers={name.replace("_", "-"): one for name, one in headers.items()},
    )


def cached_tokens(reply) -> int:
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def share(server, prompts) -> int:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        heard = [list(pool.map(lambda prompt: complete(server, prompt), three)) for three in prompts]
    return sum(cached_tokens(reply) for three in heard for reply in three)


def prompt_tokens(server) -> list[float]:
    return [server.metric("prompt_tokens_total", engine=str(engine)) for engine in (0, 1)]


def test_two_engines_find_nine_tenths_of_what_one_finds(server, folder):
    seed = random.randrange(2**32)
    prompts = prompts_with_shared_prefixes(seed)
    with serve(folder, 1) as single:
        of_one = share(single, prompts)
    of_two = share(server, prompts)
    assert of_two >= 0.9 * of_one, f"seed {seed}: {of_two} of {of_one}"
    server.wait_for(lambda: sum(prompt_tokens(server)) == sum(len(prompt) for three in prompts for prompt in three))
    assert min(prompt_tokens(server)) > 0, f"seed {seed}: both engines worked"
    assert server.metric("messages_dropped_total") == 0


def test_a_header_names_the_engine(server):
    prompt = [random.randrange(VOCABULARY) for _ in range(64)]
    assert cached_tokens(complete(server, prompt, x_data_parallel_rank="1")) == 0
    assert cached_tokens(complete(server, prompt, x_data_parallel_rank="0")) == 0
    assert cached_tokens(complete(server, prompt, x_data_parallel_rank="1")) == 48


@pytest.mark.parametrize("rank", ["2", "-1", "01", "one", ""])
def test_an_engine_that_is_not_there_is_refused(server, rank):
    reply = complete(server, [1, 2, 3], x_data_parallel_rank=rank)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"] == "x-data-parallel-rank must be the index of an engine, one of 0, 1"
    assert error["param"] == "x-data-parallel-rank"


def test_a_session_stays_with_its_engine(server):
    name, away = f"session-{random.random()}", [random.randrange(VOCABULARY) for _ in range(200)]
    first = [random.randrange(VOCABULARY) for _ in range(64)]
    assert cached_tokens(complete(server, first, x_session_id=name, x_data_parallel_rank="1")) == 0
    complete(server, away, x_data_parallel_rank="0")
    assert cached_tokens(complete(server, away, x_session_id=name)) == 0, "though the other engine has it"
    assert complete(server, first, x_session_id="no label, with a space").status_code == 400


def test_pages_of_a_dead_engine_are_forgotten(server):
    prompt = [random.randrange(VOCABULARY) for _ in range(200)]
    assert cached_tokens(complete(server, prompt, x_data_parallel_rank="1")) == 0
    assert cached_tokens(complete(server, prompt)) == 192
    dead = child(server, "process 1 0")
    os.kill(dead, signal.SIGKILL)
    server.wait_for(lambda: any("process 1 0" in name and pid != dead for name, pid in server.children().items()))
    server.wait_for(lambda: server.http.get(f"{server.url}/health").status_code == 200)
    assert cached_tokens(complete(server, prompt, x_data_parallel_rank="0")) == 0
    assert [cached_tokens(complete(server, prompt)) for _ in range(3)] == [192] * 3
