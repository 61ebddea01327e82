"""Route a request to the replica that has most likely read the beginning of its prompt already.

Ray's proxies choose a replica before they have read the body, so a router only knows what they take from a request's
headers. A header must therefore name what requests share: `x-session-id`, unless
RAY_SERVE_SESSION_ID_HEADER_KEY names another. It may be the id of a conversation, or a name for a system prompt.
"""

from __future__ import annotations

import hashlib
import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

DEFAULT_SLACK = 8


class PrefixRouter(RequestRouter):
    """Sends requests of one key to one replica, unless that is much busier than the next one for the key.

    The replicas are ranked for each key by a hash of both, so another replica, or one less, moves only the keys that
    are its own. Requests without a key, and those whose replica is too busy, go to the shorter queue of two.
    """

    def initialize_state(self, slack: int = DEFAULT_SLACK, **unknown: object) -> None:
        """
        Args:
            slack: how many more requests the first replica of a key may have than the second.
            unknown: refused.
        """
        if unknown or slack < 0:
            raise ValueError(f"the router takes slack, 0 or more; got slack={slack} and {sorted(unknown)}")
        self._slack = slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to ask, by rank; within a rank Ray takes the one with the shortest queue."""
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
        """Return the queue length that this router knows of; Ray's own number is a few seconds old at most."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _weight(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()
