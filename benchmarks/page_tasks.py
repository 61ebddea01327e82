"""Measure how long the page's thread is held while it shows a long answer: tasks over 50 ms, and the longest.

    python benchmarks/page_tasks.py [--tokens 10000] [--rate 300] [--kind mixed]

A server in this process streams an answer of Markdown with five alternatives a token, as the real one does; a
headless Chromium (`make browser`) shows it, follows it, and opens the conversation anew. Chromium itself reports tasks
over 50 ms (PerformanceObserver, `longtask`), and its trace what processor time each task of the page's thread took: the
first counts what else the machine does, the second does not.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tokenmill.serving.server.http.page import PAGE, POLICY, PREFIX, read_assets

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LONG_MS = 50
PROSE = "The mill stands by a **quiet river**, and its wheel turns *slowly* while `the miller` counts sacks of flour. "
SECTION = (
    "## Part\n\n" + PROSE * 3 + "\n\n- one item\n- another, with a [link](http://198.51.100.7/)\n\n```python\n"
    'def grind(corn):\n    return [grain.strip() for grain in corn if grain != "stone"]\n```\n\n'
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n> a quote of some words\n\n"
)
KINDS = {
    "mixed": lambda _: SECTION,
    "list": lambda number: f"{number + 1}. An item of a list that has **no end** at all.\n",
    "paragraph": lambda _: PROSE,
    "code": lambda number: ("```python\n" if not number else "") + "value = [number for number in range(10)]\n",
    "table": lambda number: ("| a | b |\n|---|---|\n" if not number else "") + f"| row {number} | **some** words |\n",
}
WATCH = """globalThis.tasks = [];
new PerformanceObserver((list) => {
  for (const { duration } of list.getEntries()) globalThis.tasks.push(Math.round(duration));
}).observe({ type: "longtask" });"""


def pieces(kind: str, count: int) -> Iterator[str]:
    """So many tokens of four characters, about those of English."""
    text, number = "", 0
    for _ in range(count):
        while len(text) < 4:
            text += KINDS[kind](number)
            number += 1
        yield text[:4]
        text = text[4:]


class Handler(BaseHTTPRequestHandler):
    """The page, and what it asks for."""

    server: Any

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with a file or with JSON."""
        assets = self.server.assets
        found = assets.get(PAGE if self.path == "/" else self.path.removeprefix("/" + PREFIX))
        if found is not None:
            self._send(found.body, found.media_type)
        elif self.path.endswith("server_info"):
            self._json({"engine": {"max_model_len": 65536, "takes_images": False}, "default_sampling": {}})
        else:
            self._json({"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        """Stream the answer."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        began, count, rate = time.monotonic(), self.server.count, self.server.rate
        for number, text in enumerate(pieces(self.server.kind, count)):
            tops = [{"token": text, "logprob": -0.1 - one, "bytes": None} for one in range(5)]
            token = tops[0] | {"top_logprobs": tops}
            usage = {"prompt_tokens": 20, "completion_tokens": number + 1, "total_tokens": number + 21}
            choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": [token]}, "finish_reason": None}
            self._event({"choices": [choice], "usage": usage})
            time.sleep(max(0.0, began + (number + 1) / rate - time.monotonic()))
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _json(self, content: dict[str, Any]) -> None:
        self._send(json.dumps(content).encode(), "application/json")

    def _send(self, body: bytes, media_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def observed(browser: Browser, page: Page, what: str) -> Iterator[None]:
    """Print what the tasks of the page's thread took inside."""
    browser.start_tracing(page=page, categories=["toplevel"])
    yield
    page.wait_for_timeout(500)
    long = sorted(page.evaluate("globalThis.tasks.splice(0)"))
    used = processor_times(json.loads(browser.stop_tracing())["traceEvents"])
    over = [one for one in used if one > LONG_MS]
    print(f"  {what}: {len(long)} tasks over {LONG_MS} ms by the clock, the longest {max(long, default=0)} ms; by the "
          f"processor {len(over)} of {len(used)}, the longest {max(used, default=0):.0f} ms", flush=True)  # fmt: skip


def processor_times(events: list[dict[str, Any]]) -> list[float]:
    """Return the milliseconds of processor time of each task on the main threads of pages."""
    mains = {(one["pid"], one["tid"]) for one in events if one.get("args", {}).get("name") == "CrRendererMain"}
    tasks = (one for one in events if (one["pid"], one["tid"]) in mains and one["name"].endswith("RunTask"))
    return [one["tdur"] / 1000 for one in tasks if "tdur" in one]


def measure(browser: Browser, page: Page, url: str) -> None:
    """Show an answer as it comes, then all of it again."""
    page.add_init_script(WATCH)
    with observed(browser, page, "page opened"):
        page.goto(url)
        page.get_by_label("Your message").fill("go on")
    with observed(browser, page, "answer streamed"):
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").wait_for()
        page.get_by_role("button", name="Send").wait_for(timeout=600_000)
    with observed(browser, page, "conversation opened anew"):
        page.reload()
        page.locator("article.assistant footer").get_by_text(re.compile("prompt tokens")).wait_for()
        page.wait_for_timeout(1500)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=300.0, help="tokens a second")
    parser.add_argument("--kind", choices=tuple(KINDS), help="what the text is of; left out: each")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        parser.error("there is no chromium on this machine: make browser")
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.assets, server.count, server.rate = read_assets(), options.tokens, options.rate
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        for server.kind in [options.kind] if options.kind else list(KINDS):
            print(f"{options.tokens} tokens of kind {server.kind}:", flush=True)
            context = browser.new_context()
            measure(browser, context.new_page(), f"http://127.0.0.1:{server.server_address[1]}/")
            context.close()
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
