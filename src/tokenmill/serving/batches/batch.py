"""OpenAI's file and batch objects, the states of a batch, and the faults of its input."""

from __future__ import annotations

import enum
import secrets
from typing import Any, Literal, get_args

import msgspec

from tokenmill.core.errors import QueueFull, TokenMillError

INPUT, OUTPUT = "batch", "batch_output"
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
    "/classify",
]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)
# Their calls draw nothing, so that a line needs no seed.
WITHOUT_SEED = frozenset({"/v1/embeddings", "/v1/rerank", "/v1/score", "/classify"})
WINDOW_SECONDS = 24 * 3600
FILE_SECONDS = 30 * 24 * 3600


class QuotaReached(TokenMillError):
    """Raised when files would take more bytes than allowed."""

    status = 507
    type = "insufficient_storage"
    code = "quota_reached"


class TooManyObjects(QueueFull):
    """Raised when there are too many files, or too many batches that have not ended."""

    code = "quota_reached"


class BatchStatus(enum.Enum):
    """The state of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True once nothing will change any more."""
        return self not in NEXT


# What may follow; nothing follows the others.
NEXT = {
    BatchStatus.VALIDATING: {BatchStatus.FAILED, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING},
    BatchStatus.IN_PROGRESS: {BatchStatus.FINALIZING, BatchStatus.EXPIRED, BatchStatus.CANCELLING},
    BatchStatus.FINALIZING: {BatchStatus.COMPLETED},
    BatchStatus.CANCELLING: {BatchStatus.CANCELLED},
}


class File(msgspec.Struct, kw_only=True):
    """OpenAI's file object."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    status: str = "processed"
    object: str = "file"


class LineFault(msgspec.Struct):
    """A fault in a line of an input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineFaults(msgspec.Struct):
    """All faults found, up to a limit."""

    data: list[LineFault]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    """Counts of all lines, and of those answered with success and with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all lines that were answered with success."""

    input_tokens: int = 0
    input_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"cached_tokens": 0})
    output_tokens: int = 0
    output_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"reasoning_tokens": 0})
    total_tokens: int = 0

    def add(self, reply: dict[str, Any]) -> None:
        """Add the usage of one reply, in the terms of any of the APIs."""
        for kind, other, detail in (("input", "prompt", "cached_tokens"), ("output", "completion", "reasoning_tokens")):
            count = reply.get(f"{kind}_tokens", reply.get(f"{other}_tokens", 0))
            details = reply.get(f"{kind}_tokens_details", reply.get(f"{other}_tokens_details")) or {}
            setattr(self, f"{kind}_tokens", getattr(self, f"{kind}_tokens") + count)
            getattr(self, f"{kind}_tokens_details")[detail] += details.get(detail, 0)
            self.total_tokens += count


class Batch(msgspec.Struct, kw_only=True):
    """OpenAI's batch object, with a time `..._at` for each state it has been in."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: BatchStatus = BatchStatus.VALIDATING
    model: str | None = None
    errors: LineFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None
    object: str = "batch"

    def move_to(self, status: BatchStatus, now: float) -> None:
        """Change the status and record the time; raise AssertionError for an illegal change, which is a bug."""
        assert status in NEXT.get(self.status, ()), f"{self.id}: {self.status.value} -> {status.value} is not legal"
        self.status = status
        setattr(self, f"{status.value}_at", int(now))


def new_id(prefix: str) -> str:
    """Return a random id, such as `file-...`, that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(12)}"
