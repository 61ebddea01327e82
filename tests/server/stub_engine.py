"""A stand-in for the engine process: it speaks the messages and repeats the prompt, one token a step.

    python -m tests.server.stub_engine FOLDER

The model folder's config.json may hold `stub`: {"step_seconds": ..., "fail": ...} to change how it behaves.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from tokenmill.channels import API, ENGINE, Inbox, LaunchFile, Outbox, worker_name
from tokenmill.messages import (
    AbortRequests,
    AddRequest,
    Done,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineStats,
    ExplainRequests,
    Logprob,
    RequestStates,
    SetPaused,
    StepOutputs,
    ToEngine,
    TokenLogprobs,
    TokenOutput,
)
from tokenmill.request import FinishReason

MAX_MODEL_LEN = 512


class Running(msgspec.Struct):
    request: AddRequest
    num_output: int = 0


class StubEngine:
    def __init__(self, folder: Path) -> None:
        launch = LaunchFile.read(folder)
        self.model = Path(launch.engine.model)
        self.stub = json.loads((self.model / "config.json").read_text()).get("stub", {})
        context = zmq.Context()
        self.inbox = Inbox(context, folder, ENGINE, ToEngine)
        self.api = Outbox(context, folder, API)
        num_workers = max(1, launch.server.tokenizer_workers)
        self.workers = [Outbox(context, folder, worker_name(i)) for i in range(num_workers)]
        self.running: dict[str, Running] = {}
        self.steps = itertools.count(1)
        self.num_generated = 0
        self.is_paused = False

    def serve(self) -> int:
        self.api.send(EngineProgress("loading weights", 1, 2))
        if "fail" in self.stub:
            self.api.send(EngineFailed(self.stub["fail"], 2))
            return 2
        if "crash" in self.stub:
            raise RuntimeError(self.stub["crash"])
        self.api.send(self.ready())
        while True:
            self.inbox.socket.poll(None if not self.running or self.is_paused else 0)
            while (message := self.inbox.receive()) is not None:
                self.take(message)
            if self.running and not self.is_paused:
                self.step()
            self.send_stats()

    def take(self, message) -> None:
        if isinstance(message, AbortRequests):
            for request_id in message.ids:
                self.running.pop(request_id, None)
        elif isinstance(message, AddRequest):
            self.running[message.id] = Running(message)
        elif isinstance(message, ExplainRequests):
            self.api.send(RequestStates(message.id, []))
        elif "is_deaf" not in self.stub:
            self.is_paused = isinstance(message, SetPaused) and message.is_paused
            self.api.send(Done(message.id, True))

    def step(self) -> None:
        time.sleep(self.stub.get("step_seconds", 0.001))
        outputs = [[] for _ in self.workers]
        for request_id, running in list(self.running.items()):
            output = self.next_token(running)
            outputs[running.request.worker].append(output)
            if output.finish_reason is not None:
                del self.running[request_id]
        number = next(self.steps)
        for worker, batch in zip(self.workers, outputs, strict=True):
            if batch:
                worker.send(StepOutputs(number, batch))

    def next_token(self, running: Running) -> TokenOutput:
        request, params = running.request, running.request.params
        prompt = request.prompt_token_ids
        token_id = prompt[running.num_output % len(prompt)]
        running.num_output += 1
        self.num_generated += 1
        room = MAX_MODEL_LEN - len(prompt)
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
            attention_backend="none", attention_reason="a stub", max_model_len=MAX_MODEL_LEN, vocab_size=512,
            page_size=16, num_pages=64, kv_bytes=1, weight_bytes=1, max_num_seqs=256, max_num_batched_tokens=2048,
            num_threads=1, threads_reason="stub", seconds={"loading weights": 0.0},
        )  # fmt: skip

    def send_stats(self) -> None:
        num_running = len(self.running)
        self.api.send(
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.exit(StubEngine(Path(sys.argv[1])).serve())
