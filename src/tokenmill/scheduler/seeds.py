"""The seed of a request's draws, fixed at arrival, so that preemption and replay draw the same tokens."""

from __future__ import annotations

from hashlib import blake2b

from tokenmill.request import Request


def request_seed(request: Request, engine_seed: int) -> int:
    """The client's seed, or one made from the engine's seed and the request's arrival; a signed 64-bit integer."""
    if request.params.seed is not None:
        return request.params.seed
    digest = blake2b(f"{engine_seed}/{request.arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
