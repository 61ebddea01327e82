"""How many threads a step gets on this machine, and why."""

from __future__ import annotations

from tokenmill.config import EngineConfig
from tokenmill.platform.memory import huge_pages
from tokenmill.platform.protocol import Platform

# The matrix products of a small model are too short to be worth sharing between threads. Measured for 11 MiB of weights
# only (one thread won, by far on busy cores); where two threads begin to win has not been measured.
ONE_THREAD_BYTES = 64 << 20


def choose_threads(config: EngineConfig, platform: Platform, weight_bytes: int) -> tuple[int, str]:
    """Settle the number of threads; returns it with the reason that the start-up screen shows.

    They are not bound to cores: whatever else runs on a busy core would hold up a bound thread, and every step with it.
    """
    if config.num_threads is not None:
        wanted, reason = config.num_threads, "--num-threads"
    elif weight_bytes < ONE_THREAD_BYTES and not platform.is_accelerator:
        wanted, reason = 1, "more would only wait for each other in so small a model"
    else:
        wanted, reason = platform.num_threads(), platform.threads_reason()
    threads = platform.set_num_threads(wanted)
    return threads, reason if platform.is_accelerator else f"{reason}; not bound to cores; {huge_pages()}"
