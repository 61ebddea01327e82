"""A headless Chromium, and what every page of these tests must keep to, whatever else is looked at."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import patience
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tests.tiers import tier
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
NUM_CLIENTS = 12
KEY = "key-of-the-page"
# Collected by the page itself, before any of its scripts.
WATCH = """addEventListener("securitypolicyviolation", (event) => {
  (globalThis.violations ??= []).push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});"""
PATIENCE_MS = 60_000
# Times that the nightly tier's browser is slower: what a page does too late shows there.
SLOWNESS = 6 if tier() == "nightly" else 1
# A microphone that beeps, and a name of this machine under which a page is no secure one.
FLAGS = (
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--host-resolver-rules=MAP *.local 127.0.0.1",
)


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, driven by playwright; without either the tests are skipped and say so.

    Of one module, since playwright keeps a loop of asyncio running in this thread, beside which tests have no other.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: requirements/dev.txt")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine (Debian: apt-get install chromium-headless-shell)")
    # A root has no sandbox; machines of tests often are one's.
    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a page of a server, of so many pixels; in the end no page may have asked anybody else for anything, broken
    its policy or raised an error."""
    opened = []

    def open_(url, width=1280, height=800, **context):
        place = browser.new_context(viewport={"width": width, "height": height}, **context)
        place.set_default_timeout(PATIENCE_MS)
        place.add_init_script(WATCH)
        page = place.new_page()
        place.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": SLOWNESS})
        foreign, errors = [], []
        host = urlsplit(url).netloc
        page.on("request", lambda request: is_foreign(request.url, host) and foreign.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        opened.append((page, foreign, errors))
        page.goto(url)
        return page

    yield open_
    for page, foreign, errors in opened:
        violations = page.evaluate("globalThis.violations ?? []")
        page.context.close()
        assert (foreign, errors, violations) == ([], [], [])


def is_foreign(url: str, host: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("blob", "data") and parts.netloc != host


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A server whose model repeats the prompt, fast."""
    with echo_server(tmp_path_factory, "echo", {"step_seconds": 0.002}) as server:
        yield server


@pytest.fixture(scope="module")
def slow_echo(tmp_path_factory):
    """The same, at 20 tokens a second, with a key. Its answers have no end that a test could meet: stop them."""
    stub = {"step_seconds": 0.05, "max_model_len": 1_000_000}
    with echo_server(tmp_path_factory, "slow", stub, api_key=(KEY,)) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture
def endless(tmp_path_factory):
    """A server that computes no prompt further than its half."""
    with echo_server(tmp_path_factory, "endless", {"step_seconds": 0.02, "endless_prompt": True}) as server:
        yield server


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A server of a real engine that is short of rows and pages, with a dozen clients that never rest: they must not
    outlive the tests that want them."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")
    engine = EngineConfig(model=str(checkpoint), num_pages=24, max_num_seqs=4, max_num_batched_tokens=32)
    is_over = threading.Event()
    with start_server(engine, ENGINE_MODULE) as server, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for number in range(NUM_CLIENTS):
            clients.submit(keep_asking, server.url, number, is_over)
        yield server
        is_over.set()


def keep_asking(url, number, is_over):
    with httpx.Client(timeout=patience(600)) as http:
        while not is_over.is_set():
            prompt = [3 + number] * (20 + 7 * number)
            body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
            if http.post(f"{url}/v1/completions", json=body).status_code != 200:
                return


def echo_server(tmp_path_factory, name, stub, **config):
    folder = write_folder(tmp_path_factory.mktemp("models") / name, byte_level_tokenizer(), config={"stub": stub})
    return start_server(EngineConfig(model=str(folder)), **config)


@pytest.fixture(scope="session")
def stub_model(tmp_path_factory):
    """A model folder for the stub engine."""
    return write_folder(tmp_path_factory.mktemp("models") / "stub", byte_level_tokenizer(), config={"stub": {}})
