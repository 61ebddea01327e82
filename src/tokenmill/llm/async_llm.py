"""Define `AsyncLLM`, the engine in this process for programs with an event loop, in the shape of vLLM's class.

    event loop:  generate ──start──┐            ┌──> yields the whole output so far
    thread:                        └─> step, step, step ... as long as anything is open

One thread does all work on the engine, in the order of the calls; between two steps it does what was asked meanwhile.
So a call waits for one step at most, and the event loop never waits.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from tokenmill.core.engine_messages import EngineReady, EngineStats
from tokenmill.core.errors import InvalidRequest, TokenMillError
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm import arguments
from tokenmill.llm.arguments import ChatOptions
from tokenmill.llm.llm import LLM, AnyPrompt
from tokenmill.llm.local_engine import Inbox
from tokenmill.llm.outputs import EmbeddingRequestOutput, RequestOutput
from tokenmill.llm.pooled import Pooling
from tokenmill.llm.tokenizer import ChatTokenizer

T = TypeVar("T")


class _Stream:
    """One call, shared by the thread that steps and the event loop that waits for its output.

    Attributes:
        inbox: deltas that the thread has put there.
        output: the result that the engine fills; None until the call has begun.
        failure: the engine's error, after which no deltas come.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.output: RequestOutput | None = None
        self.failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Tell the event loop that there is news; called in the thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self) -> None:
        """Wait in the event loop for news; raise the engine's failure."""
        while not self._has_news:
            self._news.clear()
            await self._news.wait()
        if self.failure is not None and not self.inbox:
            raise TokenMillError(f"the engine failed: {self.failure}") from self.failure

    @property
    def _has_news(self) -> bool:
        return bool(self.inbox) or self.failure is not None or (self.output is not None and self.output.finished)

    def add_deltas(self, shown: RequestOutput) -> None:
        """Add all deltas in the inbox to a result."""
        assert self.output is not None, "it has begun"
        is_over = self.output.finished
        while self.inbox:
            delta = self.inbox.popleft()
            shown.add(shown.request_ids.index(delta.id), delta)
        if is_over:  # of what was aborted there is no last delta
            for one in shown.outputs:
                one.finish_reason = one.finish_reason or FinishReason.ABORT


class AsyncLLM:
    """A model that generates for many tasks of one or more event loops at once.

    Args:
        model, options: as for `LLM`.

    Attributes:
        info: the engine that was built, and its sizes.

    Raises:
        InvalidCheckpoint, InvalidConfig: the model cannot be served on this machine; says what to change.
    """

    def __init__(self, model: str | Path = "", **options: Any) -> None:
        self._llm = LLM(model, **options)
        self.info: EngineReady = self._llm.info
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-steps")
        self._streams: dict[str, _Stream] = {}
        self._is_stepping = False

    def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt or conversation: `async for output in llm.generate(prompt, params, request_id)`.

        Each output is an object of its own with all tokens so far; the last one is `finished`. Closing the
        generator, or cancelling the task that reads it, aborts the request.

        Args:
            sampling_params: None: see `LLM.get_default_sampling_params`.
            request_id: the name for `abort` and of the outputs; None: one is made.
            options: `lora_request` and `priority`; for conversations `tools` and others, see `ChatOptions`.

        Raises:
            InvalidRequest: the prompt can never run, or a request of this name runs already.
            TokenMillError: the engine failed.
        """
        wishes: dict[str, Any] = {"priority": options.pop("priority", None)}
        wishes["lora_request"] = options.pop("lora_request", None)
        wishes["template_options"] = arguments.template_options(options)
        return self._outputs(prompt, sampling_params, request_id or uuid.uuid4().hex, wishes)

    async def embed(
        self, prompt: AnyPrompt, request_id: str | None = None, *, pooling: Pooling | None = None
    ) -> EmbeddingRequestOutput:
        """Return a vector for a prompt; see `LLM.embed`."""
        outputs = self._outputs(prompt, None, request_id or uuid.uuid4().hex, {"pooling": pooling or ""})
        found = [output async for output in outputs][-1]
        return found.answered(found.vector())

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Abort requests by name; their generators end with the output so far. Unknown names are ignored."""
        names = [request_id] if isinstance(request_id, str) else request_id
        streams = [self._streams[name] for name in names if name in self._streams]
        await self._do(lambda: self._abort(streams))

    async def get_tokenizer(self) -> ChatTokenizer:
        """Return the model's tokenizer with its chat template."""
        return await self._do(self._llm.get_tokenizer)

    async def stats(self) -> EngineStats:
        """Return the engine's counters and what is in use now; see `LLM.stats`."""
        return await self._do(self._llm.stats)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; return False if running requests prevent it."""
        return await self._do(lambda: self._llm.reset_prefix_cache(reset_running_requests))

    async def sleep(self, level: int = 1) -> None:
        """Give back memory until `wake_up`; see `LLM.sleep` for the levels."""
        await self._do(lambda: self._llm.sleep(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again; see `LLM.wake_up` for the tags."""
        await self._do(lambda: self._llm.wake_up(tags))

    def shutdown(self) -> None:
        """End all requests and free the engine's threads; wait for the step in flight."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown)

    async def _outputs(
        self, prompt: AnyPrompt, params: SamplingParams | None, name: str, wishes: dict[str, Any]
    ) -> AsyncIterator[RequestOutput]:
        if name in self._streams:
            raise InvalidRequest(f"a request of the name {name[:80]!r} runs already", "request_id")
        stream = self._streams[name] = _Stream()
        try:
            shown = await self._do(lambda: self._start(stream, prompt, params, wishes))
            shown.request_id = name
            while not shown.finished:
                await stream.wait()
                stream.add_deltas(shown)
                yield shown.copy()
        finally:
            del self._streams[name]
            # Behind its start, should that still wait for its turn; no caller waits for it.
            if stream.output is None or not stream.output.finished:
                self._leave(stream)

    async def _do(self, work: Callable[[], T]) -> T:
        """Do some work in the thread between two steps, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _leave(self, stream: _Stream) -> None:
        try:
            self._thread.submit(self._abort, [stream])
        except RuntimeError:  # it was shut down, and everything has ended
            return

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _start(
        self, stream: _Stream, prompt: AnyPrompt, params: SamplingParams | None, wishes: dict[str, Any]
    ) -> RequestOutput:
        stream.output = self._llm.start(stream.inbox, prompt, params, wishes)
        if not self._is_stepping:
            self._is_stepping = True
            self._thread.submit(self._step)
        return stream.output.copy()

    def _step(self) -> None:
        """Run a step, and queue the next one behind all work that is asked for until then."""
        self._is_stepping = False
        failure = None
        try:
            self._llm.step()
        except Exception as error:  # all waiting callers get it
            failure = error
        for stream in [*self._streams.values()]:
            if stream.output is not None:
                stream.failure = failure
            if stream.inbox or stream.failure is not None:
                stream.wake()
        if failure is None and self._llm.has_open:
            self._is_stepping = True
            self._thread.submit(self._step)

    def _abort(self, streams: Sequence[_Stream]) -> None:
        self._llm.abort([stream.output for stream in streams if stream.output is not None])
        for stream in streams:
            stream.wake()

    def _close(self) -> None:
        self._llm.close()
        for stream in [*self._streams.values()]:
            stream.wake()
