"""Says on standard error for how long the event loop of an API process has stood still."""

import asyncio
import sys
import time

LOOK_SECONDS = 0.002
LEAST_SECONDS = 0.003


class LoopProbe:
    """Looks every few milliseconds; what comes late was kept from running.

    A look that is late because other processes had the machine says nothing of this one: no more of a pause counts than
    this process has computed meanwhile.
    """

    def start(self) -> None:
        """Look from now on, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._plan()

    def _plan(self) -> None:
        self._due, self._cpu = time.perf_counter() + LOOK_SECONDS, time.process_time()
        self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        stall = min(time.perf_counter() - self._due, time.process_time() - self._cpu)
        if stall > LEAST_SECONDS:
            print(f"STALL {stall:.4f}", file=sys.stderr, flush=True)
        self._plan()
