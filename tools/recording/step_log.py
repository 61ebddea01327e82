"""Step logs as plain data in a stable form: what was planned and what came back, whatever version wrote the file.

Decoded without tokenmill, so that logs of before and after a change of its structs can be compared.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

LENGTH = struct.Struct(">I")
NO_TOKEN = -1
# Names a field has had, today's last.
NEW_ROWS = ("new_rows", "admitted")
NUM_SAMPLES = ("samples", "num_samples")
TOKEN_STARTS = ("token_starts", "starts")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The records of a log that hold a plan or an outcome, normalised. Request ids become numbers, by appearance."""
    frames = list(_frames(path.read_bytes()))
    return normalise(frames[1:])  # the first is the header


def normalise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records as they stand in a log -> one dict for each that holds a plan or an outcome.

    `ids` number requests by their first appearance; `pages` are (row, number, page); `new` are the requests that took a
    row; `sampled` are (id, tokens) of the requests of step `committed`.
    """
    numbers: dict[str, int] = {}
    batches: dict[int, list[int]] = {}
    steps = []
    for record in records:
        plan, committed = record.get("plan"), record.get("committed")
        step: dict[str, Any] = {}
        if plan is not None:
            step = _plan(plan, numbers)
            batches[step["step"]] = step["ids"]
        if committed is not None:
            batch = batches.pop(committed)
            step |= {
                "committed": committed,
                "sampled": [list(pair) for pair in zip(batch, _tokens(record, len(batch)), strict=True)],
            }
        for name in ("failures", "error"):
            if record.get(name):
                step[name] = record[name]
        if step:
            steps.append(step)
    return steps


def _plan(plan: dict[str, Any], numbers: dict[str, int]) -> dict[str, Any]:
    def number(request_id: str) -> int:
        return numbers.setdefault(request_id, len(numbers))

    new = [
        {"row": row["row"], "id": number(row["request_id"]), "token_ids": row["token_ids"], "seed": row["seed"]}
        for row in _named(plan, NEW_ROWS)
    ]
    return {
        "step": plan["step"],
        "new": new,
        "ids": [number(request_id) for request_id in plan["request_ids"]],
        "rows": plan["rows"],
        "num_computed": plan["num_computed"],
        "num_scheduled": plan["num_scheduled"],
        "num_samples": [int(samples) for samples in _named(plan, NUM_SAMPLES)],
        "pages": [list(entry) for entry in zip(plan["page_rows"], plan["page_numbers"], plan["page_ids"], strict=True)],
    }


def _tokens(record: dict[str, Any], batch_size: int) -> list[list[int]]:
    """The tokens of each request of a step: from one id each (-1: none), or from flat ids with their starts."""
    flat = record.get("token_ids", [])
    starts = _named(record, TOKEN_STARTS, None)
    if starts is None:
        ragged = [[token_id] for token_id in flat]
    else:
        ends = [*starts[1:], len(flat)]
        ragged = [flat[start:end] for start, end in zip(starts, ends, strict=True)][:batch_size]
    if len(ragged) != batch_size:
        raise ValueError(f"a step of {batch_size} requests has the outcome of {len(ragged)}")
    return [[token_id for token_id in tokens if token_id != NO_TOKEN] for tokens in ragged]


def _named(fields: dict[str, Any], names: tuple[str, ...], *default: Any) -> Any:
    for name in names:
        if name in fields:
            return fields[name]
    if default:
        return default[0]
    raise KeyError(f"none of {', '.join(names)} is in {', '.join(fields)}")


def _frames(data: bytes) -> Iterator[dict[str, Any]]:
    position = 0
    while position < len(data):
        (length,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size
        yield msgspec.msgpack.decode(data[position : position + length], strict=False)
        position += length
