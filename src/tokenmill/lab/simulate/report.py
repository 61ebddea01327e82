"""Print schedules side by side, as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenmill.lab.simulate.policies import Schedule

# What a policy is called, and its field of the scheduler's config.
POLICIES = {"policy": "policy", "batch-policy": "batch_policy", "admission": "admission"}


def table(schedules: Sequence[Schedule]) -> str:
    """Return schedules side by side; the first is that of the log's own policies."""
    rows: list[tuple[str, list[str]]] = [("", ["recorded", *("instead" for _ in schedules[1:])])]
    rows += [(label, [getattr(one.config, field) for one in schedules]) for label, field in POLICIES.items()]
    rows.append(("steps", [f"{one.num_steps:,}" for one in schedules]))
    rows.append(("tokens run", [f"{one.num_tokens:,}" for one in schedules]))
    rows.append(("preemptions", [f"{one.num_preemptions:,}" for one in schedules]))
    rows.append(("seconds in all", [f"{one.seconds:,.2f}" for one in schedules]))
    for name, samples in (
        ("s to first token", [one.first_token for one in schedules]),
        ("s to the end", [one.end for one in schedules]),
    ):
        rows.append((f"{name}, mean", [f"{sum(some) / len(some):,.3f}" if some else "-" for some in samples]))
        for percent in (50, 90, 99):
            row = [f"{np.percentile(some, percent):,.3f}" if some else "-" for some in samples]
            rows.append((f"{name}, p{percent}", row))
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(schedules))]
    return "\n".join(
        f"{label:<22}" + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    )
