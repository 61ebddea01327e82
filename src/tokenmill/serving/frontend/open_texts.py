"""The texts whose vectors or scores are awaited: their requests, and the answers to these.

Nothing is decoded and nothing stops early, so a text costs a text worker little more than its two messages.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenmill.core.errors import TokenMillError
from tokenmill.core.messages import AddRequest, GenerateText, RequestRejected, TextOutput, ToEngine, TokenOutput
from tokenmill.serving.frontend.prompt_processor import PreparedTexts


class OpenTexts:
    """Starts and ends the requests of texts. `worker`: the inbox to which the engine sends outputs."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        # Number of tokens of each text.
        self._open: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def start(self, message: GenerateText, prepared: PreparedTexts) -> list[ToEngine]:
        """Return a request for each text of a call that has not been answered yet."""
        assert message.pooling is not None, "texts are pooled"
        requests: list[ToEngine] = []
        for request_id, prompt in zip(message.ids, prepared.prompts, strict=True):
            if message.resumed is not None and request_id not in message.resumed:
                continue
            pooling = message.pooling
            if prompt.first or prompt.second:
                pooling = msgspec.structs.replace(pooling, first=prompt.first, second=prompt.second)
            self._open[request_id] = len(prompt.token_ids)
            requests.append(
                AddRequest(
                    id=request_id,
                    prompt_token_ids=prompt.token_ids,
                    params=message.params,
                    priority=message.priority,
                    cache_salt=message.cache_salt,
                    tenant=message.tenant,
                    worker=self._worker,
                    needs_no_output=True,
                    pooling=pooling,
                    engine=message.engine,
                    session=message.session,
                    is_background=message.is_background,
                    adapter=message.adapter,
                    deadline=message.deadline,
                )
            )
        return requests

    def end(self, output: TokenOutput) -> TextOutput | RequestRejected | None:
        """Return the answer to a text, which is a vector or scores, or its refusal; None: it is not there yet."""
        if output.finish_reason is None:
            return None
        num_tokens, status = self._open.pop(output.id), output.error_status
        if output.error is not None and status != TokenMillError.status:
            return RequestRejected(ids=[output.id], status=status, error=output.error)
        return TextOutput(
            output.id,
            "",
            [],
            num_tokens,
            output.num_cached_tokens,
            output.finish_reason,
            error=output.error,
            embedding=output.embedding,
            scheduled_at=output.scheduled_at,
            num_external_cached_tokens=output.num_external_cached_tokens,
        )

    def forget(self, ids: Iterable[str]) -> None:
        """Drop those of these ids that are open."""
        for request_id in ids:
            self._open.pop(request_id, None)
