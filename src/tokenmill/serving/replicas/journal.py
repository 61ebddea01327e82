"""Record a text worker's open requests with their output tokens, so that any engine can continue any of them.

The death of an engine preempts all of its requests. A recomputed request draws the same tokens, since a draw is keyed
by its seed and the position; they count as output for penalties, limits and grammars.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from tokenmill.core.messages import AddRequest, TokenOutput


class Journal:
    """Keeps each `AddRequest` from its acceptance to its end, in order of acceptance."""

    def __init__(self) -> None:
        self._open: dict[str, AddRequest] = {}

    def __iter__(self) -> Iterator[AddRequest]:
        return iter(list(self._open.values()))

    def accept(self, request: AddRequest) -> None:
        """Record an accepted request."""
        self._open[request.id] = request

    def take(self, outputs: Iterable[TokenOutput]) -> None:
        """Record the outputs of a step."""
        for output in outputs:
            request = self._open.get(output.id)
            if request is None:
                continue
            if output.finish_reason is not None:
                del self._open[output.id]
                continue
            if not request.output_token_ids and output.token_ids and request.params.prompt_logprobs is not None:
                # They are out with the first token; asked for again, they would cost the whole prompt.
                request.params = msgspec.structs.replace(request.params, prompt_logprobs=None)
            request.output_token_ids += output.token_ids

    def leave(self, ids: Iterable[str]) -> None:
        """Forget requests that are about to be aborted."""
        for request_id in ids:
            self._open.pop(request_id, None)
