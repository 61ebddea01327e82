"""Print the rows of a script of tools/gpu as they come, and all of them once more as one line of JSON last."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from tools.gpu.report import one_line

# A measurement that has begun may go on for this much longer than new ones may begin.
GRACE_SECONDS = 30.0
EXPIRED = 2
DETAIL_CHARACTERS = 2000

Row = dict[str, Any]


def parse(doc: str, argv: Sequence[str] | None, seconds: float) -> argparse.Namespace:
    """The options that all these scripts have. On a CPU kernels are interpreted from here on."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny dry run")
    parser.add_argument("--seconds", type=float, default=seconds, help="after which no new measurement begins")
    options = parser.parse_args(argv)
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return options


def guarded(what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Rows of one part; what goes wrong there is its last row, and other parts go on."""
    try:
        yield from rows
    except Exception:
        yield {"check": what, "passed": False, "detail": traceback.format_exc()[-DETAIL_CHARACTERS:]}


class Rows:
    """Rows as they come. A process that hangs on a device ends some time after its deadline, with what it has found.

    Args:
        seconds: until the deadline.
    """

    def __init__(self, seconds: float) -> None:
        self._found: list[Row] = []
        self._until = time.monotonic() + seconds
        self._timer = threading.Timer(seconds + GRACE_SECONDS, self._expire)
        self._timer.daemon = True

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self._until - time.monotonic()

    @property
    def has_time(self) -> bool:
        """Return True if another measurement may begin."""
        return self.seconds_left > 0

    def take(self, rows: Iterable[Row]) -> list[Row]:
        """Print rows and keep them, until the deadline; those that came."""
        taken = []
        for row in rows:
            taken.append(row)
            self._found.append(row)
            print(one_line(row), flush=True)
            if not self.has_time:
                break
        return taken

    @property
    def has_failed(self) -> bool:
        """Return True if a row says that something did not pass."""
        return any(row.get("passed") is False for row in self._found)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._finish(self.has_time and error[0] is None)

    def _finish(self, is_complete: bool) -> None:
        print(json.dumps({"is_complete": is_complete, "rows": self._found}), flush=True)

    def _expire(self) -> None:
        self._finish(False)
        sys.stdout.flush()
        os._exit(EXPIRED)
