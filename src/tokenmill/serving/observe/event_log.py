"""Write lines about events: plain text for people, or one JSON object each for programs (`--log-format json`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from tokenmill.ipc.log_lines import escaped, escaped_json


class EventLog:
    """Writes lines to the log."""

    def __init__(self, write: Callable[[str], None], as_json: bool) -> None:
        self._write = write
        self._as_json = as_json

    def note(self, event: str, message: str, **fields: Any) -> None:
        """Write a line: the message, or a JSON object with the time, the kind of event, the message and the fields."""
        if not self._as_json:
            self._write(escaped(message))
            return
        line = {"time": round(time.time(), 3), "event": event, "message": message} | fields
        self._write(escaped_json(msgspec.json.encode(line).decode()))
