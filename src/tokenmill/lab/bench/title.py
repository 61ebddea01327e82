"""Title a document of `bench` in two lines: kind, model and load; lengths, version and processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any


def title(document: Mapping[str, Any]) -> str:
    """Return the two lines.

    Raises:
        LookupError: it is no such document.
    """
    kind, workload, machine = document["benchmark"], document["workload"], document["machine"]
    facts = document["server" if kind == "serve" else "engine"]
    model = _model_name(str(facts["model"]))
    dtype = f" ({facts['dtype']})" if "dtype" in facts else ""
    versions = f"tokenmill {machine['tokenmill']}, {machine['processor']}"
    return f"bench {kind}: {model}{dtype}, {_load(kind, workload)}\n{_lengths(workload)}; {versions}"


def _model_name(model: str) -> str:
    """Return the end of a path; of a snapshot in the hub's cache, the name of its model."""
    parts = PurePath(model).parts
    hub = [part.removeprefix("models--").replace("--", "/") for part in parts if part.startswith("models--")]
    return hub[0] if hub else "/".join(parts[-2:])


def _load(kind: str, workload: Mapping[str, Any]) -> str:
    if kind == "latency":
        return f"batches of {_numbers(workload['batch_sizes'])} requests, {workload['num_iters']} of each"
    count = f"{workload['num_prompts']} requests"
    if kind == "throughput":
        return f"{count} submitted at once"
    rate, most = workload["request_rate"], workload["max_concurrency"]
    paced = f"{count} at {rate:g} per second" if rate else count
    if most is not None:
        return f"{paced}, at most {most} at once"
    return paced if rate else f"{paced} sent at once"


def _lengths(workload: Mapping[str, Any]) -> str:
    if "input_lens" in workload:
        return f"prompts of {_numbers(workload['input_lens'])} tokens, {workload['output_len']} output tokens"
    prefix = f"{workload['prefix_len']} + " if workload["prefix_len"] else ""
    lengths = f"prompts of {prefix}{_law(workload['input_len'])} tokens, {_law(workload['output_len'])} output tokens"
    profile = workload.get("profile")
    return f"profile {profile} x {workload['length_scale']}: {lengths}" if profile else lengths


def _law(lengths: Mapping[str, Any]) -> str:
    if "low" not in lengths:
        return f"up to {lengths['high']}"
    return str(lengths["high"]) if lengths["low"] == lengths["high"] else f"{lengths['low']} to {lengths['high']}"


def _numbers(values: list[int]) -> str:
    return ", ".join(map(str, values))
