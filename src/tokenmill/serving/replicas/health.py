"""The health of one part of the server, an engine or a text worker: signs of life and of progress.

Time is counted by the owner's loop (`pass_time`), not by a clock: while that loop is held up, or the whole machine
sleeps, no part falls silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.core.part_messages import Beat
from tokenmill.ipc.heartbeat import REST_SECONDS

# Beats come every second: a part is silent within 5 seconds of a beat that has not come.
SILENT_SECONDS = 4.0
# While a part starts it loads libraries, and some of that stops all of its threads.
SILENT_START_SECONDS = 60.0


class PartHealth:
    """The latest signs of life of a part, and their age.

    Attributes:
        name: its name in messages, e.g. `text worker 0`.
        waits_for_pong: a ping has been sent and not answered yet.
        is_starting: it has not loaded all that it needs yet.
    """

    def __init__(self, name: str, timeout: float) -> None:
        """`timeout`: seconds within which the part's loop must answer."""
        self.name = name
        self._timeout = timeout
        self.mark_starting()

    def mark_starting(self) -> None:
        """Mark the part as starting, for the first time or after a death."""
        self.waits_for_pong = False
        self.is_starting = True
        self._silence = 0.0
        self._unanswered = 0.0
        self._silent_seconds = SILENT_START_SECONDS
        self._beat: Beat | None = None
        self._is_stuck = False

    def started(self) -> None:
        """Mark the part as started: from now on every beat is expected on time."""
        self._silent_seconds = SILENT_SECONDS
        self._silence = 0.0
        self.is_starting = False

    def pass_time(self, seconds: float) -> None:
        """Count `seconds` of silence."""
        self._silence += seconds
        if self.waits_for_pong:
            self._unanswered += seconds

    def beats(self, beat: Beat) -> None:
        """Take in a beat."""
        self._beat = beat
        self._silence = 0.0

    @property
    def is_resting(self) -> bool:
        """True if the part has nothing to do and sends no beats: only its answers to pings are signs of life."""
        return self._beat is not None and self._beat.rests and not self.waits_for_pong and not self.is_starting

    def is_asked(self) -> None:
        """Note that a ping has been sent."""
        self.waits_for_pong = True

    def answers(self) -> None:
        """Note that a pong has come."""
        self.waits_for_pong = False
        self._unanswered = 0.0
        self._silence = 0.0

    def note_stuck(self, is_stuck: bool) -> None:
        """Note whether the engine's requests make no progress."""
        self._is_stuck = is_stuck

    @property
    def is_deaf(self) -> bool:
        """True if the part's loop seems to take no messages, so that it should get none."""
        return self._silence > self._allowed_silence or self.is_lost

    @property
    def is_overdue(self) -> bool:
        """True if the part has exceeded the time of any allowed job."""
        beat = self._beat
        is_late = beat is not None and bool(beat.job) and beat.seconds > beat.limit
        return is_late or self.is_lost or self._silence > max(self._timeout, self._allowed_silence)

    @property
    def _allowed_silence(self) -> float:
        """Seconds without a sign of life after which the part counts as silent; one that rests is asked more seldom."""
        rests = self._beat is not None and self._beat.rests
        return self._silent_seconds + (REST_SECONDS if rests else 0.0)

    @property
    def is_lost(self) -> bool:
        """True if the part's loop has not answered for too long to wait any longer."""
        # A little later than the other signs of the same trouble, which say more of it.
        return self._unanswered > self._timeout + SILENT_SECONDS

    @property
    def delay(self) -> float:
        """Seconds for which the part has let others wait."""
        beat = self._beat
        return max(self._silence, self._unanswered, beat.seconds if beat is not None and beat.job else 0.0)

    @property
    def trouble(self) -> str | None:
        """A sentence that names the part and its trouble, or None."""
        if self._silence > self._allowed_silence:
            return f"{self.name} has not reported for {self._silence:.0f} seconds"
        beat = self._beat
        # Only what a beat has said counts: the job may have ended right after it.
        if beat is not None and beat.job and beat.seconds > beat.limit:
            return (
                f"{self.name} has been busy with {beat.job} for {beat.seconds:.0f} seconds; {beat.limit:g} are allowed"
            )
        if self.is_lost:
            return f"{self.name} has taken no message for {self._unanswered:.0f} seconds"
        return f"{self.name} makes no progress with the requests that it has" if self._is_stuck else None


def trouble_of(parts: Iterable[PartHealth]) -> str | None:
    """Return sentences about the trouble of these parts, or None."""
    return "; ".join(filter(None, (part.trouble for part in parts))) or None
