"""Which replica gets a request: the one that has most likely read the beginning of its prompt already.

Ray's proxies choose a replica before they have read the body, so a router knows of a request no more than what they
take from its headers. What requests share must therefore be said in one: `x-session-id`, unless
RAY_SERVE_SESSION_ID_HEADER_KEY names another. The id of a conversation will do, or a name for a system prompt.
"""

from __future__ import annotations

import hashlib
import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

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
        key = pending_request.metadata.session_id
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


def _weight(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()
