"""Share the server's address among trials, and a decorator that makes a call at once and prints how it went.

Standard library only: it runs inside the environments of the clients.
"""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

URL = os.environ["TOKENMILL_URL"]
BASE = f"{URL}/v1"
MODEL = "tokenmill-demo"
SECONDS = 120


def call(name: str) -> Callable[[Callable[[], object]], None]:
    """Make the call; one line of JSON says whether it gave what it should, or the error."""

    def run(function: Callable[[], object]) -> None:
        signal.alarm(SECONDS)
        try:
            got = function()
            error = "" if got else "it gave nothing"
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}".replace("\n", " ")[:300] or type(problem).__name__
        finally:
            signal.alarm(0)
        print("\n" + json.dumps({"call": name, "error": error}), flush=True)

    return run


def scratch() -> Path:
    """A new folder."""
    return Path(tempfile.mkdtemp(prefix="tokenmill-trial-"))
