"""The open requests of one API call, as an asynchronous stream of text deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

import msgspec

from tokenmill.core.answer import joined
from tokenmill.core.messages import TextOutput

_COMPACT_AT = 64


class Generation:
    """Yields `(index, delta)` until each of its requests has ended; leaving its `async with` aborts the rest.

    Deltas that come while the client does not read are merged, so a slow reader costs no more memory than its text.

    Attributes:
        takes_remarks: its reader takes empty deltas as signs of life.
    """

    def __init__(self, ids: Sequence[str], close: Callable[[Generation], None]) -> None:
        """`close` is called once, when the reader leaves."""
        self.takes_remarks = False
        self._index = {request_id: i for i, request_id in enumerate(ids)}
        self._waiting: dict[str, list[TextOutput]] = {}
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # an asyncio.Event would make one too, and keep a queue
        self._close = close
        self.open_ids = set(ids)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(self)

    def __aiter__(self) -> AsyncIterator[tuple[int, TextOutput]]:
        return self

    async def __anext__(self) -> tuple[int, TextOutput]:
        """Return the next delta of any request.

        Raises:
            TokenMillError: a prompt was rejected, or the engine has died.
        """
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            if not self.open_ids:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        request_id = next(iter(self._waiting))
        return self._index[request_id], merge(self._waiting.pop(request_id))

    def deliver(self, output: TextOutput) -> None:
        """Queue a delta of one of its requests."""
        waiting = self._waiting.setdefault(output.id, [])
        waiting.append(output)
        if len(waiting) >= _COMPACT_AT:
            waiting[:] = [merge(waiting)]
        if output.finish_reason is not None:
            self.open_ids.discard(output.id)
        self._wake()

    def remark(self) -> None:
        """Send an empty delta as a sign of life, if the reader takes them."""
        request_id = next(iter(self.open_ids), None)
        if self.takes_remarks and request_id is not None:
            self.deliver(TextOutput(request_id, "", [], 0, 0))

    def fail(self, error: Exception) -> None:
        """Raise this error in the reader, after the deltas that already wait for it."""
        self._failure = self._failure or error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge(outputs: Sequence[TextOutput]) -> TextOutput:
    """Join consecutive deltas of one request into one. Progress of its prompt beside tokens is old news."""
    outputs = [output for output in outputs if output.progress is None] or outputs[-1:]
    if len(outputs) == 1:
        return outputs[0]
    with_logprobs = [output.logprobs for output in outputs if output.logprobs is not None]
    answers = [output.answer for output in outputs if output.answer is not None]
    token_bytes: dict[int, bytes] = {}
    for output in outputs:
        token_bytes.update(output.token_bytes or {})
    return msgspec.structs.replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        answer=joined(piece for pieces in answers for piece in pieces) if answers else None,
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[position for positions in with_logprobs for position in positions] if with_logprobs else None,
        token_bytes=token_bytes or None,
        prompt=next((output.prompt for output in outputs if output.prompt is not None), None),
        change=next((output.change for output in outputs if output.change is not None), None),
    )
