"""kill -9 of a whole server in the middle of a batch: after the next start every line is answered once, and the same.

TOKENMILL_CHAOS_LINES=1000 TOKENMILL_CHAOS_KILLS=5 python -m pytest tests/serving/server/test_batch_survival.py
"""

import io
import json
import os
import random
import signal
from functools import partial

import pytest

from tests.eventually import patience
from tests.serving.server.running_server import is_alive, spawn
from tests.serving.server.test_batches_api import answers, wait_for_end
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.batches.lines import line_seed
from tokenmill.serving.replicas.starter import ENGINE_MODULE

NUM_LINES = int(os.environ.get("TOKENMILL_CHAOS_LINES", "150"))
NUM_KILLS = int(os.environ.get("TOKENMILL_CHAOS_KILLS", "1"))
CHAT = "/v1/chat/completions"


def kill_all(server) -> None:
    """All processes at once, as when the machine loses its power."""
    pids = [server.process.pid, *server.children().values()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.process.wait(timeout=patience())
    server.wait_for(lambda: not any(is_alive(pid) for pid in pids))
    server.clean()


@pytest.mark.timeout(900)
def test_every_line_is_answered_once_and_with_the_same_text_however_often_all_is_killed(tiny_checkpoint, tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}, {NUM_LINES} lines")
    rng = random.Random(seed)
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=300, max_num_seqs=16)
    bodies = [
        {
            "messages": [{"role": "user", "content": f"line {number}"}],
            "max_tokens": rng.randrange(1, 24),
            "temperature": 1.0,
        }
        for number in range(NUM_LINES)
    ]
    lines = [{"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(bodies)]
    # Each of the lives, but for the last, ends when so many lines have been recorded.
    ends = sorted(rng.sample(range(1, NUM_LINES * 3 // 4), NUM_KILLS))
    batch = None
    for end in [*ends, None]:
        server = spawn(engine, ENGINE_MODULE, batch_dir=str(tmp_path / "batches"))
        try:
            server.wait_for(lambda server=server: "READY" in server.output())
            client = server.client
            if batch is None:
                file = client.files.create(file=io.BytesIO("\n".join(map(json.dumps, lines)).encode()), purpose="batch")
                batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            if end is not None:
                server.wait_for(partial(has_answered, client, batch, end))
                continue
            batch = wait_for_end(client, batch, 60 + NUM_LINES)
            assert batch.status == "completed"
            assert (batch.request_counts.total, batch.request_counts.completed) == (NUM_LINES, NUM_LINES)
            assert batch.error_file_id is None
            output = answers(client, batch.output_file_id)  # which checks that no line is there twice
            assert list(output) == [line["custom_id"] for line in lines]
            assert_texts_are_undisturbed(server, batch, output, rng.sample(lines, 40))
        finally:
            kill_all(server)


def has_answered(client, batch, count: int) -> bool:
    return client.batches.retrieve(batch.id).request_counts.completed >= count


def assert_texts_are_undisturbed(server, batch, output, lines) -> None:
    for line in lines:
        name = line["custom_id"]
        direct = server.post(CHAT, line["body"] | {"seed": line_seed(batch.id, name)}).json()
        assert output[name]["response"]["body"]["choices"] == direct["choices"], name
