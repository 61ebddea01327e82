"""Fit a step model to recorded steps and keep it in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenmill.core.errors import TokenMillError
from tokenmill.engine.loop.step_log import read_log
from tokenmill.lab.simulate.step_model import describe, fit, recorded_steps


def write_model(logs: Sequence[Path], output: Path) -> None:
    """Fit a model to the steps of logs, write it and describe how good it is.

    Raises:
        TokenMillError: a file is no step log, there are too few steps, or the model cannot be written.
    """
    steps = []
    for log in logs:
        header, records = read_log(log)
        if header.speculation is not None or header.transfers is not None:
            raise TokenMillError(f"{log}: steps with drafts, or with KV from elsewhere, have times of another kind")
        steps += list(recorded_steps(records))
    model = fit(steps)
    try:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    except OSError as error:
        raise TokenMillError(f"cannot write {output}: {error.strerror}") from error
    print(describe(model))
