"""A run of an adapter: a process of its own, what it writes, and its peak memory; or its error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.adapters.adapter import Setup
from benchmarks.peers.child import Child
from benchmarks.peers.environments import python_of
from benchmarks.peers.peers import Peer


def run_adapter(peer: Peer, setup: Setup, seconds: float) -> dict[str, Any]:
    """Run an adapter for at most so long; returns its outcome and its `peak`, or its `error`."""
    outcome = Path(setup.outcome)
    outcome.unlink(missing_ok=True)
    setup.write(setup_file := outcome.with_suffix(".setup"))
    command = [str(python_of(peer.environment)), "-m", f"benchmarks.peers.adapters.{peer.adapter}", str(setup_file)]
    variables = {"OMP_NUM_THREADS": str(setup.threads), **peer.variables()}
    child = Child(command, setup.threads, outcome.with_suffix(".log"), variables)
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} seconds"}
    if code != 0 or not outcome.exists():
        return {"error": f"exit code {code}:\n{child.tail()}"}
    return {**json.loads(outcome.read_text()), "peak": child.peak}
