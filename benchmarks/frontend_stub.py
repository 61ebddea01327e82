"""A stand-in for the engine: every running request gets one token of the vocabulary each step, at a fixed pace.

python -m frontend_stub FOLDER 0 0    (started by the server; its pace is in TOKENMILL_STUB_STEP_SECONDS)
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import zmq

from tokenmill.config.model_files import read_json
from tokenmill.core.engine_messages import EngineReady, EngineStats
from tokenmill.core.messages import AbortRequests, AddRequest, StepOutputs, ToEngine, TokenOutput
from tokenmill.core.part_messages import Ping, Pong
from tokenmill.core.request import FinishReason
from tokenmill.ipc.channels import API, Inbox, Outbox, engine_name, worker_name
from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.ipc.launch_file import LaunchFile


def serve(folder: Path, step_seconds: float) -> None:
    """Answer until the parent is gone."""
    launch = LaunchFile.read(folder)
    model = Path(launch.engine.model)
    vocab_size = int(read_json(model, "config.json")["vocab_size"])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToEngine] = Inbox(context, folder, engine_name(0), ToEngine)
    api = Outbox(context, folder, API)
    names = map(worker_name, launch.topology.workers)
    workers = {name: Outbox(context, folder, name) for name in names}
    Heartbeat(context, folder, inbox, launch.server.engine_timeout).__enter__()  # until the process ends
    api.send(_ready(model, vocab_size))
    left: dict[str, int] = {}
    worker_of: dict[str, str] = {}
    draw = random.Random(0)
    due = time.monotonic()
    for step in range(1, sys.maxsize):
        while (message := inbox.receive()) is not None:
            if isinstance(message, AddRequest):
                left[message.id] = message.params.max_tokens or 1
                worker_of[message.id] = message.worker
            elif isinstance(message, AbortRequests):
                for request_id in message.ids:
                    left.pop(request_id, None)
            elif isinstance(message, Ping):
                api.send(Pong(engine_name(0)))
        outputs: dict[str, list[TokenOutput]] = {name: [] for name in workers}
        for request_id in list(left):
            left[request_id] -= 1
            is_last = not left[request_id]
            token = TokenOutput(request_id, [draw.randrange(vocab_size // 2)], FinishReason.LENGTH if is_last else None)
            outputs[worker_of[request_id]].append(token)
            if is_last:
                del left[request_id]
        for name, batch in outputs.items():
            if batch:
                workers[name].send(StepOutputs(step, batch))
        if step % 16 == 0:
            api.send(_stats(step, len(left)))
        due = max(due + step_seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _ready(model: Path, vocab_size: int) -> EngineReady:
    return EngineReady(
        model=str(model),
        architecture="Stub",
        num_parameters=1,
        dtype="float32",
        device="cpu",
        kernels="none",
        kernels_reason="a stub",
        attention_backend="none",
        attention_reason="a stub",
        max_model_len=8192,
        vocab_size=vocab_size,
        page_size=16,
        num_pages=1024,
        kv_bytes=1,
        weight_bytes=1,
        max_num_seqs=1024,
        max_num_batched_tokens=2048,
        num_threads=1,
        threads_reason="stub",
        seconds={},
    )


def _stats(step: int, num_running: int) -> EngineStats:
    return EngineStats(
        step=step,
        num_running=num_running,
        num_waiting=0,
        num_rows_used=num_running,
        num_pages=1024,
        num_pages_pinned=0,
        num_pages_evictable=0,
        num_preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
        prompt_tokens=0,
        generation_tokens=0,
    )


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(Path(sys.argv[1]), float(os.environ["TOKENMILL_STUB_STEP_SECONDS"]))
