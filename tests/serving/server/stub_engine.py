"""A stand-in for the engine process: it speaks the messages and repeats the prompt, one token a step.

    python -m tests.serving.server.stub_engine FOLDER INDEX RANK LIFE

The model folder's config.json may hold `stub`: {"step_seconds": ..., "fail": ...} to change how it behaves, and
`stub-1`, which engine 1 obeys instead. `restart_seconds`: how long the next life takes to begin; `max_model_len`: how
many tokens a prompt and its answer may have; `endless_prompt`: no prompt is ever computed further than its half. Ranks
above 0 only show that they live.
"""

import itertools
import json
import os
import signal
import struct
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from tokenmill.core.engine_messages import Done, EngineProgress, EngineReady, EngineStats, RequestState, RequestStates
from tokenmill.core.live import LiveReport, LiveRequest, ShowTurns
from tokenmill.core.messages import (
    AbortRequests,
    AddRequest,
    ExplainRequests,
    PromptProgress,
    SetPaused,
    StepOutputs,
    TokenOutput,
    ToReporter,
)
from tokenmill.core.part_messages import EngineMessage, LeaveWorker, PartFailed, Ping, Pong, WatchEngine
from tokenmill.core.plan import Logprob, TokenLogprobs
from tokenmill.core.request import FinishReason
from tokenmill.ipc.channels import API, LAST_WORD_MILLISECONDS, Inbox, Outbox, engine_name
from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.ipc.interrupts import accept_signals
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.stack_dump import offer_stacks, stack_file

MAX_MODEL_LEN = 512


class Running(msgspec.Struct):
    request: AddRequest
    num_output: int = 0


class StubEngine:
    def __init__(self, folder: Path, index: int, rank: int, life: int) -> None:
        launch = LaunchFile.read(folder)
        self.index, self.rank = index, rank
        self.name = engine_name(index, rank, life)
        self.model = Path(launch.engine.model)
        config = json.loads((self.model / "config.json").read_text())
        self.stub = config.get(f"stub-{index}", config.get("stub", {}))
        self.max_model_len = self.stub.get("max_model_len", MAX_MODEL_LEN)
        context = zmq.Context()
        self.inbox = Inbox(context, folder, self.name, ToReporter)
        self.api = Outbox(context, folder, API)
        self.heartbeat = Heartbeat(context, folder, self.inbox, launch.server.engine_timeout)
        self.connect = lambda name: Outbox(context, folder, name)
        self.workers = {}
        self.running: dict[str, Running] = {}
        self.steps = itertools.count(1)
        self.num_generated = 0
        self.is_paused = False
        time.sleep(self.stub.get("restart_seconds", 0.0) if life else 0.0)

    def serve(self) -> int:
        with self.heartbeat:
            return self.run()

    def send(self, message) -> None:
        if isinstance(message, EngineMessage):
            message.engine = self.index
        self.api.send(message)

    def run(self) -> int:
        if self.rank:
            return self.run_rank()
        self.send(EngineProgress("loading weights", 1, 2))
        if "fail" in self.stub:
            self.send(PartFailed(self.name, self.stub["fail"], 2))
            self.api.close(LAST_WORD_MILLISECONDS)
            return 2
        if "crash" in self.stub:
            raise RuntimeError(self.stub["crash"])
        self.send(self.ready())
        while True:
            self.inbox.socket.poll(None if not self.running or self.is_paused else 0)
            while (message := self.inbox.receive()) is not None:
                self.take(message)
            if self.running and not self.is_paused:
                self.step()
            self.send_stats()

    def run_rank(self) -> int:
        while True:
            self.inbox.socket.poll(None)
            while self.inbox.receive() is not None:
                self.send(Pong(self.name))

    def take(self, message) -> None:
        if isinstance(message, AbortRequests):
            for request_id in message.ids:
                self.running.pop(request_id, None)
        elif isinstance(message, AddRequest):
            self.running[message.id] = Running(message, len(message.output_token_ids))
        elif isinstance(message, LeaveWorker):
            self.running = {
                request_id: running
                for request_id, running in self.running.items()
                if running.request.worker != message.worker
            }
        elif isinstance(message, WatchEngine):
            pass  # it has no cache to tell of, and who counts its requests knows its load
        elif isinstance(message, Ping):
            self.send(Pong(self.name))
        elif isinstance(message, ExplainRequests):
            self.send(
                RequestStates(message.id, [self.state(one) for one in message.request_ids if one in self.running])
            )
        elif isinstance(message, ShowTurns):
            self.send(self.report(message))
        elif "is_deaf" not in self.stub:
            self.is_paused = isinstance(message, SetPaused) and message.is_paused
            self.send(Done(message.id, self.stub.get("resets", True)))

    def state(self, request_id: str) -> RequestState:
        prompt = self.running[request_id].request.prompt_token_ids
        return RequestState(
            id=request_id, status="running", wait_reason="", priority=0, num_prompt_tokens=len(prompt),
            num_output_tokens=self.running[request_id].num_output, num_computed_tokens=0, num_cached_tokens=0,
            num_preemptions=0,
        )  # fmt: skip

    def report(self, asked: ShowTurns) -> LiveReport:
        requests = [
            LiveRequest(
                one,
                "running",
                row,
                "",
                1,
                running.num_output,
                1,
                0,
                0,
                num_left_tokens=(running.request.params.max_tokens or self.max_model_len) - running.num_output,
                deadline=running.request.deadline,
            )
            for row, (one, running) in enumerate(self.running.items())
        ]
        return LiveReport(
            id=asked.id, now=time.perf_counter(), num_turns=0, turns=[], requests=requests, num_requests=len(requests),
            tree=[],
        )  # fmt: skip

    def step(self) -> None:
        time.sleep(self.stub.get("step_seconds", 0.001))
        outputs = {}
        for request_id, running in list(self.running.items()):
            output = self.next_token(running)
            outputs.setdefault(running.request.worker, []).append(output)
            if output.finish_reason is not None:
                del self.running[request_id]
        number = next(self.steps)
        for worker, batch in outputs.items():
            if worker not in self.workers:
                self.workers[worker] = self.connect(worker)
            self.workers[worker].send(StepOutputs(number, batch, self.name))

    def next_token(self, running: Running) -> TokenOutput:
        request, params = running.request, running.request.params
        prompt = request.prompt_token_ids
        if "endless_prompt" in self.stub:
            half = PromptProgress(len(prompt), 0, len(prompt) // 2, 3.0) if request.wants_progress else None
            return TokenOutput(request.id, [], progress=half)
        if request.pooling is not None:
            return TokenOutput(request.id, [], FinishReason.LENGTH, embedding=struct.pack("<2f", 0.6, 0.8))
        token_id = prompt[running.num_output % len(prompt)]
        running.num_output += 1
        self.num_generated += 1
        room = self.max_model_len - len(prompt)
        limit = min(room, params.max_tokens or room)
        logprobs = None
        if params.logprobs is not None:
            top = [Logprob(token_id, -0.5, 1), Logprob(3, float("-inf"), 2)][: params.logprobs]
            logprobs = [TokenLogprobs(Logprob(token_id, -0.5, 1), top)]
        return TokenOutput(
            id=request.id,
            token_ids=[token_id],
            finish_reason=FinishReason.LENGTH if running.num_output >= limit else None,
            num_cached_tokens=len(prompt) // 2,
            logprobs=logprobs,
        )

    def ready(self) -> EngineReady:
        return EngineReady(
            model=str(self.model), architecture="Stub", num_parameters=1, dtype="float32", device="cpu",
            kernels="none", kernels_reason="a stub",
            attention_backend="none", attention_reason="a stub", max_model_len=self.max_model_len, vocab_size=512,
            page_size=16, num_pages=64, kv_bytes=1, weight_bytes=1, max_num_seqs=256, max_num_batched_tokens=2048,
            num_threads=1, threads_reason="stub", seconds={"loading weights": 0.0},
        )  # fmt: skip

    def send_stats(self) -> None:
        num_running = len(self.running)
        self.send(
            EngineStats(
                step=0,
                num_running=num_running,
                num_waiting=0,
                num_rows_used=num_running,
                num_pages=64,
                num_pages_pinned=num_running,
                num_pages_evictable=0,
                num_preemptions=0,
                prefix_queries=0,
                prefix_hits=0,
                prompt_tokens=0,
                generation_tokens=self.num_generated,
            )
        )


def end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    accept_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    folder, (index, rank, life) = Path(sys.argv[1]), map(int, sys.argv[2:])
    offer_stacks(stack_file(folder, engine_name(index, rank, life)))
    sys.exit(StubEngine(folder, index, rank, life).serve())
