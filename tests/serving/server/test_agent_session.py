"""A coding agent's session: each turn computes its new tokens and two pages at most, whatever its client changes.

The bounded form of `benchmarks/agent_session.py`, with the demo model.
"""

import contextlib
import dataclasses
import os
import random
import signal
import threading

import pytest
from benchmarks.agent_session import HEADER, PAGE_SIZE, Shape, play, session, too_much

from tests.eventually import eventually, join, patience
from tests.serving.server.running_server import start_server
from tests.serving.server.test_kv_disk import num_records
from tokenmill.config.configs import EngineConfig
from tokenmill.demo import demo_model_path
from tokenmill.serving.server.process.launch import ENGINE_MODULE

SHAPE = Shape(tools=4, tool_words=20, system_words=250, turns=8, result_words=30, agents=3, agent_turns=2)

ENGINE = f"{ENGINE_MODULE} 0 0"


@pytest.fixture
def rng():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def engine(tmp_path):
    return EngineConfig(
        model=str(demo_model_path()), num_pages=512, page_size=PAGE_SIZE, max_num_seqs=4, max_num_batched_tokens=512,
        kv_disk=str(tmp_path / "kv"), kv_disk_size=64 << 20,
    )  # fmt: skip


def start(engine, **config):
    return start_server(engine, ENGINE_MODULE, served_model_name=("demo",), **config)


def posted(server, path, body):
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.timeout(300)
def test_each_turn_computes_its_new_tokens_also_after_kills(engine, tmp_path, rng):
    turns = list(session(SHAPE, rng))
    assert {turn.agent for turn in turns} == {0, 1, 2, 3}
    costs, num_stored = [], 0
    with contextlib.ExitStack() as servers:
        server = servers.enter_context(start(engine))

        def after(cost):
            nonlocal num_stored, server
            costs.append(cost)
            num_stored += cost.total // PAGE_SIZE - (cost.total - cost.computed) // PAGE_SIZE
            disk = tmp_path / "kv"
            eventually(lambda: num_records(disk) == num_stored, lambda: f"{num_records(disk)} of {num_stored} pages")
            if len(costs) == len(turns) // 3:
                pid = server.children()[ENGINE]
                os.kill(pid, signal.SIGKILL)
                server.wait_for(lambda: server.children().get(ENGINE, pid) != pid and server.is_well())
            elif len(costs) == 2 * len(turns) // 3:
                server.wait_for(
                    lambda: server.metric("volatile_blocks_total", rule="claude-billing-header") == len(costs)
                )
                for pid in [server.process.pid, *server.children().values()]:
                    os.kill(pid, signal.SIGKILL)
                server = servers.enter_context(start(engine))

        play(turns, lambda *call: posted(server, *call), after)
    assert [cost.turn for cost in costs] == turns
    assert too_much(costs) == []


@pytest.mark.timeout(300)
def test_what_no_rule_prevents_is_told_to_the_operator(engine, rng):
    turns = list(session(SHAPE, rng))[:2]
    # By torch a token takes several times as long: an answer is not over before it is looked at.
    with start(dataclasses.replace(engine, kernels="torch"), volatile_blocks="keep") as server:
        costs = play(turns, lambda *call: posted(server, *call), lambda cost: None)
        assert len(too_much(costs)) == 1
        body = turns[1].body
        body["system"][0]["text"] = HEADER.format(1, 2)
        watched = {}

        def stream():
            with server.http.stream("POST", f"{server.url}/v1/messages", json=body | long) as reply:
                watched["id"] = f"msg_{reply.headers['x-request-id']}"
                for line in reply.iter_lines():
                    if "content_block_start" in line:
                        started.set()

        long, started = {"stream": True, "max_tokens": 900, "ignore_eos": True}, threading.Event()
        thread = threading.Thread(target=stream)
        thread.start()
        assert started.wait(patience())
        server.post("/pause?mode=keep&clear_cache=false")  # else it may have ended before it is asked for
        report = server.http.get(f"{server.url}/v1/requests/{watched['id']}").json()
        server.post("/abort_requests", {"abort_all": True})
        server.post("/resume")
        join(thread)
        change = report["prefix"]["change"]
        assert report["prefix"]["volatile"] == []
        assert change["cause"] == "claude-billing-header"
        assert change["num_cached"] <= change["position"] < 80
        assert change["num_equal"] > 0.8 * costs[0].total
        assert "00002" in change["now"]
        assert "00002" not in change["was"]
        server.wait_for(lambda: server.metric("prefix_changes_total", cause="claude-billing-header") == 2)
        assert server.output().count("a prompt changed at token") == 1
