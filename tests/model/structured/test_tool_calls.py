"""No call of any notation is malformed: the short form of `make calls`."""

from __future__ import annotations

from tests.model.structured.tool_calls import OPENINGS, check
from tests.seeding import seed_for
from tests.tiers import scaled
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS

SEED = seed_for(__name__)


def test_every_call_is_json_and_matches_its_schema() -> None:
    print(f"seed {SEED}")
    assert set(OPENINGS) == set(NOTATIONS)
    counts = check(SEED, scaled(32))
    for faults in (counts.not_json, counts.not_valid, counts.not_read, counts.failed):
        assert not faults, faults[:3]
    assert set(counts.calls) == set(OPENINGS)
