"""Which replica gets a request: the one that has most likely read the beginning of its prompt already.

Ray's proxies choose a replica before they have read the body, so a router sees the headers of a request and not its
prompt. What requests share must therefore be said in a header: a session (`x-session-id`, as for Ray's own router), or
any name for the prompt's beginning (`x-prefix-key`), e.g. that of the system prompt.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

PREFIX_HEADER = b"x-prefix-key"
DEFAULT_SLACK = 8


class PrefixRouter(RequestRouter):
    """Sends requests of one key to one replica, as long as that is not much busier than the next one for the key.

    The replicas are ranked for each key by a hash of both, so another replica, or one less, moves only the keys that
    are its own. Requests without a key, and those whose replica is too busy, go to the shorter queue of two.
    """

    def initialize_state(self, slack: int = DEFAULT_SLACK, **unknown: object) -> None:
        """
        Args:
            slack: how many requests more than the second of its rank the first one may have.
            unknown: refused.
        """
        if unknown or slack < 0:
            raise ValueError(f"the router takes slack, 0 or more; got slack={slack} and {sorted(unknown)}")
        self._slack = slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas to ask, by preference; of those of one rank, Ray takes the one with the shortest queue."""
        if pending_request is None:
            return [candidate_replicas]
        # Else a full fleet would be asked again without a pause.
        pending_request.routing_context.should_backoff = True
        key = key_of(pending_request)
        if not key or len(candidate_replicas) < 2:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        ranked = sorted(candidate_replicas, key=lambda replica: _weight(key, replica.replica_id.unique_id))
        first, second, *others = ranked
        if self._queued(first) - self._queued(second) > self._slack:
            return [[first, second], others]
        # Twice: who has no time to say how long its queue is gets more of it then, and what it has read is worth that.
        return [[first], [first], [second], others]

    def _queued(self, replica: RunningReplica) -> int:
        """As far as this router knows; Ray's own number is a few seconds old at most."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def key_of(request: PendingRequest) -> str:
    """What a request shares with others; empty: nothing that is known.

    A session comes first: its prompts begin with all that was said before, which is more than any other prefix.
    """
    if request.metadata.session_id:
        return f"session {request.metadata.session_id}"
    scope: dict[str, Any] = getattr(request.args[0], "asgi_scope", {}) if request.args else {}
    for name, value in scope.get("headers", ()):
        if name == PREFIX_HEADER:
            return f"prefix {value.decode('latin-1')}"
    return ""


def _weight(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()
