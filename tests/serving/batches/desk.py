"""A folder with its service and runner, for tests: with a route of its own and a clock of its own."""

import asyncio
import contextlib
import json
import math
from collections import Counter

from tests.eventually import eventually_async
from tokenmill.serving.batches.runner import BatchRunner, Reply
from tokenmill.serving.batches.service import BatchLimits, BatchService
from tokenmill.serving.batches.storage import Storage

CHAT = "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")


class Desk:
    """A folder with its service and runner, which are started, killed and started again."""

    def __init__(self, folder, **limits) -> None:
        self.folder = folder
        self.limits = BatchLimits(**({"max_bytes": 1 << 20, "max_files": 50} | limits))
        self.now = 1_000_000.0
        self.is_busy = False
        self.num_slots = 4
        self.asked: Counter[str] = Counter()
        self.open = 0
        self.most_open = 0
        self.statuses: dict[str, list[int]] = {}
        self.num_free = math.inf  # so many lines are answered at once; the others when the gate is open
        self.gate = asyncio.Event()

    async def answer(self, endpoint, batch_id, request_id, line) -> Reply:
        name = json.loads(line)["custom_id"]
        self.asked[name] += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(0)
            if self.asked.total() > self.num_free:
                await self.gate.wait()
        finally:
            self.open -= 1
        status = (self.statuses.get(name) or [200]).pop(0)
        return Reply(status, b'{"usage": {"prompt_tokens": 2, "completion_tokens": 1}}')

    @contextlib.asynccontextmanager
    async def started(self):
        self.storage = Storage(self.folder)
        self.runner = BatchRunner(self.storage, lambda: self.is_busy, lambda: self.now)
        self.service = BatchService(self.storage, self.limits, self.runner, lambda: self.now)
        running = asyncio.ensure_future(self.runner.run(self.answer, self.num_slots))
        try:
            yield self
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self.storage.close()

    async def upload(self, *names, owner="", seconds=None) -> str:
        incoming = await self.service.begin_file()
        try:
            for name in names:
                line = {"custom_id": name, "url": CHAT, "body": {}}
                self.service.write_file(incoming, json.dumps(line).encode() + b"\n")
            return (await self.service.keep_file(owner, incoming, "in.jsonl", seconds)).id
        finally:
            await self.service.drop_file(incoming)

    async def create(self, *names, owner="") -> str:
        file_id = await self.upload(*names, owner=owner)
        return (await self.service.create(owner, CHAT, file_id, None, None)).id

    async def wait(self, condition) -> None:
        await eventually_async(condition)

    async def end_of(self, batch_id, owner=""):
        async def is_over():
            return (await self.service.batch(owner, batch_id)).status.value in FINAL

        await self.wait(is_over)
        return await self.service.batch(owner, batch_id)

    def lines(self, file_id) -> dict:
        """The lines of an output file by their custom_id; each has one."""
        if file_id is None:
            return {}
        lines = [json.loads(line) for line in self.storage.files.body(file_id).read_bytes().splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines), "each once"
        return found


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 60))
