"""`--samples FILE`: write every sample of a benchmark as it was taken, one a line, as CSV or as JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenmill.core.whole_file import whole_file
from tokenmill.lab.bench.offline import Trace
from tokenmill.lab.bench.streams import Stream

Sample = dict[str, Any]


def step_samples(trace: Trace, **facts: int) -> Iterator[Sample]:
    """Yield a sample for each step that brought tokens; `facts` come first in each."""
    ends, tokens = pairwise([0.0, *trace.times]), pairwise([0, *trace.tokens])
    for number, ((start, end), (before, after)) in enumerate(zip(ends, tokens, strict=True), 1):
        yield {
            **facts,
            "step": number,
            "phase": "prefill" if number <= trace.prefill_steps else "decode",
            "seconds": end - start,
            "end_seconds": end,
            "output_tokens": after - before,
        }


def request_samples(streams: Sequence[Stream]) -> Iterator[Sample]:
    """Yield a sample for each request, failed ones included; times that it does not have are None."""
    start = min(stream.sent for stream in streams)
    for number, stream in enumerate(streams, 1):
        answered = stream.error is None
        yield {
            "request": number,
            "sent_seconds": stream.sent - start,
            "input_tokens": len(stream.prompt.token_ids),
            "output_tokens": stream.num_tokens,
            "ttft_seconds": stream.ttft if stream.arrivals else None,
            "time_per_output_token_seconds": stream.seconds_per_token if answered else None,
            "e2e_seconds": stream.arrivals[-1] - stream.sent if answered else None,
            "inter_token_seconds": stream.gaps,
            "error": stream.error,
        }


def write_samples(path: str, samples: Iterable[Sample]) -> None:
    """Write samples in the format of the name's ending; in CSV, None is empty and a list is separated by spaces.

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(Path(path)) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        if path.endswith(".jsonl"):
            file.writelines(json.dumps(sample) + "\n" for sample in samples)
            return
        rows = csv.writer(file, lineterminator="\n")
        for number, sample in enumerate(samples):
            if number == 0:
                rows.writerow(sample)
            rows.writerow(" ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in sample.values())
