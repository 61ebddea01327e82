"""A short run of `exactness`; `make exactness` is the long one."""

from __future__ import annotations

import random

from tests.engine.speculation.exactness import check


def test_no_token_differs() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    seen = check(seed, num_tokens=5000, num_requests=24)
    assert seen["scenarios"] >= 4
    assert 0 < seen["accepted"] < seen["drafts"]
