"""Take the pictures of the page for docs/web.md: each tab light, dark and as wide as a phone.

    python tools/screenshots.py [--out docs/pictures] [--only live]

One more, `sources`, is of an answer about a long file.

Starts a server of the demo model with two engines short of rows and pages, lets clients ask it, and looks at the
page in a headless Chromium (`make browser`). Pictures have 128 colours, a third of the bytes.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Name, colours, width and height in pixels of the style sheet.
LOOKS = (("light", "light", 1200, 720), ("dark", "dark", 1200, 720), ("phone", "light", 390, 780))
SERVER = ("--data-parallel-size", "2", "--max-num-seqs", "8", "--num-pages", "110", "--max-num-batched-tokens", "256")
NUM_CLIENTS = 30
LOAD_SECONDS = 20
LONG_FILE = Path("docs/scheduler.md")
PREFIXES = ("Tell me a story about a dog. ", "Once there was a mill by a quiet river. ", "What is a token? ")


@contextmanager
def server() -> Iterator[str]:
    """The address of a server of the demo model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tokenmill", "serve", "--port", str(port), *SERVER]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            time.sleep(0.1)
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                continue
        yield url
    finally:
        process.terminate()
        process.wait()


def keep_asking(url: str, number: int, is_over: threading.Event) -> None:
    """One client: one of a few prefixes, some words of its own, a pause now and then."""
    source = random.Random(number)
    with httpx.Client(timeout=120) as http:
        while not is_over.is_set():
            own = " ".join(str(source.randrange(1000)) for _ in range(source.randrange(5, 60)))
            prompt = source.choice(PREFIXES) * source.randrange(2, 12) + own
            body = {"prompt": prompt, "max_tokens": source.randrange(30, 200), "ignore_eos": True}
            http.post(f"{url}/v1/completions", json=body)
            is_over.wait(source.random())


@contextmanager
def load(url: str) -> Iterator[None]:
    """Clients that keep the engines busy inside."""
    is_over = threading.Event()
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        try:
            for number in range(NUM_CLIENTS):
                clients.submit(keep_asking, url, number, is_over)
            time.sleep(LOAD_SECONDS)
            yield
        finally:
            is_over.set()


def show_chat(page: Page, is_wide: bool) -> None:
    """Two questions answered, a token's alternatives open, and where there is room the settings."""
    for question in ("What is TokenMill?", "Tell me a short story about a dog."):
        page.get_by_label("Your message").fill(question)
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").wait_for()
        page.get_by_role("button", name="Send").wait_for()
    if is_wide:
        page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Tokens").last.click()
    page.locator("article.assistant").last.locator(".token.sure-3").first.click()


def show_sources(page: Page, is_wide: bool) -> None:
    """A question about a long file, answered, with the passages that went with it."""
    page.locator("form.composer input[type=file]").set_input_files(LONG_FILE)
    page.locator("form.composer .file").wait_for()
    page.get_by_label("Your message").fill("Why is a request preempted?")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").wait_for()
    page.get_by_role("button", name="Send").wait_for()
    page.locator(".sources summary").click()


def show_compare(page: Page, is_wide: bool) -> None:
    """Two answers to one question, one of them by a preset."""
    page.evaluate("""localStorage.setItem("tokenmill-presets", '{"careful": {"temperature": 0}}')""")
    page.reload()
    page.get_by_role("group", name="Answer 2").get_by_role("combobox", name="Settings").select_option("careful")
    page.get_by_label("One question for both").fill("Tell me a short story about a dog.")
    page.get_by_role("button", name="Ask both").click()
    page.get_by_role("button", name="Keep both").wait_for()


def show_live(page: Page, is_wide: bool) -> None:
    """Some seconds of load, paused, with a request of the queue chosen."""
    engine = page.get_by_role("article", name="Engine 0")
    engine.locator(".facts").get_by_text(re.compile(r"[1-9]\d* waiting")).wait_for()
    page.wait_for_timeout(12_000)
    canvas = engine.get_by_role("img", name=re.compile("^Timeline"))
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] * 0.6, "y": box["height"] * 0.72})
    page.wait_for_timeout(1_000)
    page.get_by_role("button", name="Pause").click()


def show_api(page: Page, is_wide: bool) -> None:
    """A route that was tried out."""
    route = page.locator("details.route").filter(has_text="POST /tokenize")
    route.locator("summary").click()
    route.get_by_label("Body", exact=True).fill('{"prompt": "Once there was a mill."}')
    route.get_by_role("button", name="Try it").click()
    route.get_by_text("200").wait_for()
    route.scroll_into_view_if_needed()
    page.evaluate("node => node.scrollIntoView({block: 'start'})", route.element_handle())


TABS = {"chat": show_chat, "sources": show_sources, "compare": show_compare, "live": show_live, "api": show_api}


def take(browser: Browser, url: str, tab: str, look: tuple[str, str, int, int], folder: Path) -> None:
    """One picture, `web-<tab>-<look>.png`."""
    name, colours, width, height = look
    scheme: Any = colours
    tall = height + (520 if tab == "live" else 0)
    context = browser.new_context(viewport={"width": width, "height": tall}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{url}/#{'chat' if tab == 'sources' else tab}")
    TABS[tab](page, width > 1000)
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    context.close()
    path = folder / f"web-{tab}-{name}.png"
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size >> 10} KiB", flush=True)


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--only", choices=tuple(TABS), help="one tab; left out: all")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        parser.error("there is no chromium on this machine: make browser")
    tabs = [options.only] if options.only else list(TABS)
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        for look in LOOKS:
            for tab in (one for one in tabs if one != "live"):
                if tab == "sources" and look is not LOOKS[0]:
                    continue
                take(browser, url, tab, look, options.out)
        if "live" in tabs:
            with load(url):
                for look in LOOKS:
                    take(browser, url, "live", look, options.out)
        browser.close()


if __name__ == "__main__":
    main()
