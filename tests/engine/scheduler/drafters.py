"""Drafters that know what will come, to drive the scheduler with."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from tokenmill.core.request import Request, TokenArray
from tokenmill.lab.conformance.memory_runner import VOCAB_SIZE, next_token


class KnowingDrafter:
    """Drafts for each request by itself, and holds none."""

    @abstractmethod
    def draft(self, request: Request, limit: int) -> TokenArray:
        """Up to `limit` tokens for one request."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[TokenArray]:
        return [self.draft(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def holds(self, request: Request, num_running: int) -> bool:
        return False

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts

    def forget_request(self, request: Request) -> None:
        pass


class HalfRightDrafter(KnowingDrafter):
    """Proposes what the runner will say, with an error now and then, and holds a request now and then.

    By the length of its tokens, so that it repeats.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def holds(self, request: Request, num_running: int) -> bool:
        return random.Random(request.arrival * 1000 + request.num_tokens).random() < 0.5

    def draft(self, request: Request, limit: int) -> TokenArray:
        context = request.token_ids.tolist()
        rng = random.Random(request.arrival * 1000 + len(context))
        drafts = []
        for _ in range(rng.randint(0, min(self.most, limit))):
            token = next_token(np.array(context))
            drafts.append((token + (rng.random() < 0.25)) % VOCAB_SIZE)
            context.append(token)
        return np.array(drafts, dtype=np.int32)
