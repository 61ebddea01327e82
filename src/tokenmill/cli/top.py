"""`tokenmill top`: show the activity of a running server, moment by moment, from its own /metrics."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from tokenmill.cli.model_access import add_server_flags, connect
from tokenmill.config.parser import Parser, positive
from tokenmill.core.errors import InvalidConfig

if TYPE_CHECKING:
    from rich.panel import Panel

PREFIX = "tokenmill:"
BAR_WIDTH = 30
HISTORY = 60
SPARKS = " ▁▂▃▄▅▆▇█"


class Sample(msgspec.Struct, frozen=True):
    """The numbers of one scrape, summed over engines: by name, and by name and label where a label matters."""

    seconds: float
    values: dict[tuple[str, str], float]

    def get(self, name: str, label: str = "") -> float:
        """Return one number; 0 if the server does not have it."""
        return self.values.get((name, label), 0.0)

    def labels(self, name: str) -> dict[str, float]:
        """Return the numbers of a name by label."""
        return {label: value for (own, label), value in self.values.items() if own == name}


def run(arguments: Sequence[str]) -> int:
    """Show frames until q or Ctrl-C, or one; returns 0.

    Raises:
        TokenMillError: no server answers, or it refuses.
    """
    namespace = make_parser().parse(arguments)
    if namespace.interval <= 0:
        raise InvalidConfig(f"--interval must be above 0 seconds, got {namespace.interval}")
    from rich.console import Console
    from rich.live import Live

    from tokenmill.llm.remote import ServerRefused

    server, console = connect(namespace), Console()
    first = read_sample(server.read("/metrics"))
    if not first.values:
        raise ServerRefused(f"{namespace.url}/metrics has no metrics of a TokenMill server")
    view = View(namespace.url, first)
    if namespace.once or not console.is_terminal:
        time.sleep(namespace.interval)
        console.print(view.frame(read_sample(server.read("/metrics"))))
        return 0
    with pressed_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while not keys.quits_within(namespace.interval):
            try:
                live.update(view.frame(read_sample(server.read("/metrics"))), refresh=True)
            except ServerRefused as error:
                live.update(f"{error}\n(retrying every {namespace.interval:g} s; q ends)", refresh=True)
    return 0


def make_parser() -> Parser:
    """Return the parser of `top`."""
    parser = Parser("top", "Watch a running server: requests, pages, tokens per second, cache hits. q ends.")
    add_server_flags(parser)
    parser.add_argument(
        "--interval", type=positive, default=1.0, metavar="S", help="seconds between updates (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    return parser


class Keys:
    """The keys that are pressed in a terminal; without one, time passes and none are."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def quits_within(self, seconds: float) -> bool:
        """Wait; return True at once when q (or Escape) is pressed meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
            elif select.select([self._descriptor], [], [], left)[0]:
                pressed = os.read(self._descriptor, 32)
                if pressed in (b"q", b"Q", b"\x1b"):
                    return True
                if not pressed:  # the terminal is gone
                    self._descriptor = None
        return False


@contextlib.contextmanager
def pressed_keys() -> Iterator[Keys]:
    """Provide the keys of standard input one by one, if it is a terminal, and leave that as it was."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)  # Ctrl-C stays a signal
    try:
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_sample(exposition: str) -> Sample:
    """Parse a scrape of now; keep only the engines' and the clients' own sums."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and "le" not in sample.labels:
                labels = [
                    sample.labels[name] for name in ("reason", "part", "finished_reason") if name in sample.labels
                ]
                key = sample.name.removeprefix(PREFIX), "".join(labels)
                values[key] = values.get(key, 0.0) + sample.value
    return Sample(time.monotonic(), values)


@dataclass(slots=True)
class View:
    """Frames of one server; rates are between a frame and the one before it."""

    url: str
    last: Sample
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def frame(self, now: Sample) -> Panel:
        """Return a frame of the current numbers."""
        from rich.panel import Panel
        from rich.table import Table

        before, self.last = self.last, now
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column()
        for label, text in self._lines(before, now):
            table.add_row(label, text)
        return Panel(table, title=f"TokenMill at {self.url}", title_align="left")

    def _lines(self, before: Sample, now: Sample) -> list[tuple[str, str]]:
        seconds = max(now.seconds - before.seconds, 1e-9)

        def grown(name: str, label: str = "") -> float:
            return now.get(name, label) - before.get(name, label)

        def mean_ms(name: str, label: str = "") -> str:
            count = grown(f"{name}_count", label)
            return f"{grown(f'{name}_sum', label) / count * 1e3:,.1f} ms" if count else "-"

        self.speeds.append(grown("generation_tokens_total") / seconds)
        pages, pinned = now.get("num_pages"), now.get("num_pages_pinned")
        cached = now.get("num_pages_evictable")
        queries, hits = now.get("prefix_cache_queries_total"), now.get("prefix_cache_hits_total")
        reasons = {name: count for name, count in now.labels("num_requests_waiting_by_reason").items() if count}
        waiting = ", ".join(f"{count:.0f} for {name.replace('_', ' ')}" for name, count in reasons.items())
        ended = now.labels("request_success_total").items()
        steps = grown("engine_steps_total")
        drafted, kept = grown("spec_decode_num_draft_tokens_total"), grown("spec_decode_num_accepted_tokens_total")
        tokens = grown("iteration_tokens_total_sum") / steps if steps else 0.0
        parts = ", ".join(f"{part} {mean_ms('step_seconds', part)}" for part in ("schedule", "run", "commit"))
        return [
            ("running", f"{now.get('num_requests_running'):,.0f} requests, {now.get('num_rows_used'):,.0f} rows"),
            ("waiting", f"{now.get('num_requests_waiting'):,.0f}" + (f": {waiting}" if waiting else "")),
            ("pages", f"{bar(pinned, cached, pages)} {pinned:,.0f} used, {cached:,.0f} cached, of {pages:,.0f}"),
            ("tokens/s", f"{self.speeds[-1]:,.1f} generated, {grown('prompt_tokens_total') / seconds:,.1f} of prompts"),
            ("", sparks(self.speeds)),
            ("cache hits", f"{hits / queries:.0%} of {queries:,.0f} prompt tokens" if queries else "no prompts yet"),
            ("steps", f"{steps / seconds:,.1f} a second, {tokens:,.1f} tokens each: {parts}"),
            *(
                [("drafts", f"{kept / drafted:.0%} right of {drafted / seconds:,.1f} tokens a second")]
                if drafted
                else []
            ),
            ("first token", f"{mean_ms('time_to_first_token_seconds')}, then {mean_ms('inter_token_latency_seconds')}"),
            ("ended", ", ".join(f"{count:,.0f} {reason}" for reason, count in ended)),
            ("preempted", f"{now.get('num_preemptions_total'):,.0f}"),
        ]


def bar(used: float, cached: float, total: float) -> str:
    """Draw pages as a bar: used, kept by the cache, free."""
    first = round(BAR_WIDTH * used / total) if total else 0
    second = min(round(BAR_WIDTH * cached / total) if total else 0, BAR_WIDTH - first)
    return "█" * first + "▒" * second + "░" * (BAR_WIDTH - first - second)


def sparks(values: Sequence[float]) -> str:
    """Draw values as a row of bars, the highest of them full."""
    highest = max(values, default=0.0) or 1.0
    return "".join(SPARKS[round(value / highest * (len(SPARKS) - 1))] for value in values)
