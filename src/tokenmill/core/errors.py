"""Typed errors that a user can cause, and their meaning to clients and in exit codes.

Each carries one clear sentence. The server maps them to OpenAI error bodies (`status`, `type`, `param`), the CLI to
exit codes. Internal invariants use `assert` with a message instead: they are never the user's fault.
"""

from __future__ import annotations


class TokenMillError(Exception):
    """Base of every error that a user can cause or fix."""

    status = 500
    type = "internal_error"
    exit_code = 1


class InvalidRequest(TokenMillError, ValueError):
    """A request that can never be served as it is; `param` names the wrong field (None: the request as a whole).

    Attributes:
        code: OpenAI's code for the mistake, if programs look for one.
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None
    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WrongTask(InvalidRequest):
    """The model is made for something else: it generates, embeds, or scores."""

    code = "wrong_task"


class NotFound(InvalidRequest):
    """No open request, response, file or batch has this id, or none that the client may access."""

    status = 404
    code = "not_found"


class Conflict(InvalidRequest):
    """The operation is impossible in the current state."""

    status = 409
    code = "conflict"


class TooLarge(InvalidRequest):
    """A body or a file exceeds the size limit."""

    status = 413


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room in the context."""

    code = "context_length_exceeded"


class PromptTooCostly(InvalidRequest):
    """Building the prompt takes more time or memory than one request may use."""


class InvalidConfig(TokenMillError, ValueError):
    """A flag, a config key or a combination of them that cannot work on this machine or for this model."""

    type = "invalid_config"
    exit_code = 2


class OutOfMemory(InvalidConfig):
    """The machine has too little memory for the operation."""

    type = "out_of_memory"


class InvalidCheckpoint(TokenMillError, ValueError):
    """A checkpoint that cannot be served; the message names the file and, where there is one, the tensor."""

    type = "invalid_checkpoint"
    exit_code = 2


class EngineDead(TokenMillError):
    """The engine process ended or never became ready."""

    status = 503
    type = "engine_unavailable"


class EngineFailed(TokenMillError):
    """The engine cannot go on: its device or one of its ranks has failed, and so would every further step."""

    status = 503
    type = "engine_unavailable"


class Unavailable(TokenMillError):
    """Something besides the model that the request needs does not work now; the request is not at fault.

    Attributes:
        retry_after: seconds after which to try again.
    """

    status = 503
    type = "server_busy"
    code = "server_busy"
    retry_after = 1


class DiskFull(TokenMillError):
    """A disk of the server is full or broken; existing files are unchanged."""

    status = 507
    type = "insufficient_storage"
    code = "disk_full"


class QueueFull(TokenMillError):
    """More requests or tokens wait than `--max-num-queued-reqs` or `--max-num-queued-tokens` allow.

    Attributes:
        retry_after: seconds after which the queue should have room.
    """

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


Refusal = InvalidRequest | Unavailable
"""The reasons that a request cannot begin: its own fault, or one that may pass."""
