"""Typed errors that a user can cause, and what each one means at the edges.

Each carries one clear sentence. The server maps them to OpenAI error bodies (`status`, `type`, `param`), the CLI to
exit codes. Internal invariants use `assert` with a message instead: they are never the user's fault.
"""

from __future__ import annotations


class TokenMillError(Exception):
    """Base of every error that a user can cause or can mend."""

    status = 500
    type = "internal_error"
    exit_code = 1


class InvalidRequest(TokenMillError, ValueError):
    """A request that can never be served as it is; `param` names the field at fault (None: the request as a whole).

    Attributes:
        code: OpenAI's word for the mistake, where it has one that programs look for.
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None
    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFound(InvalidRequest):
    """Nothing has this id: no open request, response, file or batch, or none that the client may know of."""

    status = 404
    code = "not_found"


class Conflict(InvalidRequest):
    """It cannot be done in the state that things are in now."""

    status = 409
    code = "conflict"


class TooLarge(InvalidRequest):
    """A body or a file exceeds what one may have."""

    status = 413


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room in the context."""

    code = "context_length_exceeded"


class PromptTooCostly(InvalidRequest):
    """To make the prompt takes more time or memory than one request may have."""


class InvalidConfig(TokenMillError, ValueError):
    """A flag, a config key or a combination of them that cannot work on this machine or for this model."""

    type = "invalid_config"
    exit_code = 2


class OutOfMemory(InvalidConfig):
    """The machine has not enough memory for what is asked of it, or has none left."""

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
    """The engine cannot go on: what it runs on has failed, and so would every further step."""

    status = 503
    type = "engine_unavailable"


class Unavailable(TokenMillError):
    """Something beside the model that the request needs does not work now; the request is not at fault.

    Attributes:
        retry_after: seconds after which it is worth another try.
    """

    status = 503
    type = "server_busy"
    code = "server_busy"
    retry_after = 1


class DiskFull(TokenMillError):
    """A disk of the server takes nothing more, or is broken; what was there is as it was."""

    status = 507
    type = "insufficient_storage"
    code = "disk_full"


class QueueFull(TokenMillError):
    """More waits than `--max-num-queued-reqs` or `--max-num-queued-tokens` allow.

    Attributes:
        retry_after: seconds after which there should be room.
    """

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


Refusal = InvalidRequest | Unavailable
"""Why a request cannot begin: by its own fault, or for a reason that may pass."""
