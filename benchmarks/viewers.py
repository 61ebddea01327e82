"""Time a server with viewers of /live: tokens a second without any and with some, in turns, so that drift hits both.

    python benchmarks/viewers.py [--url http://127.0.0.1:8000] [--viewers 5] [--clients 16] [--seconds 8] [--rounds 6]

Each round runs both, in an order that changes. Printed are the medians over the rounds, and the least and the most.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx


def keep_asking(url: str, number: int, is_over: threading.Event) -> None:
    """One client: prompts of its own, answers of 200 tokens, one after the other."""
    with httpx.Client(timeout=60) as http:
        while not is_over.is_set():
            body = {"prompt": [10 + number] * 40, "max_tokens": 200, "ignore_eos": True}
            http.post(f"{url}/v1/completions", json=body).raise_for_status()


def watch(url: str, is_over: threading.Event) -> int:
    """One viewer: reads until it is over; the bytes that it got."""
    num_bytes = 0
    with httpx.Client(timeout=60) as http, http.stream("GET", f"{url}/live") as reply:
        for part in reply.iter_raw():
            num_bytes += len(part)
            if is_over.is_set():
                break
    return num_bytes


@contextmanager
def viewers(url: str, count: int) -> Iterator[None]:
    """So many of them inside."""
    is_over = threading.Event()
    with ThreadPoolExecutor(max(1, count)) as threads:
        try:
            for _ in range(count):
                threads.submit(watch, url, is_over)
            yield
        finally:
            is_over.set()


def generated(url: str) -> float:
    """Tokens since the start of the server."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tokenmill:generation_tokens_total{"))


def rate(url: str, num_viewers: int, seconds: float) -> float:
    """Tokens a second with so many viewers."""
    with viewers(url, num_viewers):
        time.sleep(1.0)
        began, before = time.perf_counter(), generated(url)
        time.sleep(seconds)
        return (generated(url) - before) / (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    found: dict[int, list[float]] = {0: [], given.viewers: []}
    is_over = threading.Event()
    with ThreadPoolExecutor(given.clients) as clients:
        try:
            for number in range(given.clients):
                clients.submit(keep_asking, given.url, number, is_over)
            time.sleep(2.0)
            for number in range(given.rounds):
                for count in list(found) if number % 2 else list(found)[::-1]:
                    found[count].append(rate(given.url, count, given.seconds))
        finally:
            is_over.set()
    for count, rates in found.items():
        print(f"{count} viewers: {statistics.median(rates):.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f})")
    without, with_them = (statistics.median(rates) for rates in found.values())
    print(f"cost: {100 * (1 - with_them / without):.1f}%")


if __name__ == "__main__":
    main()
