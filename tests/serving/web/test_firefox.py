"""The same in Debian's Firefox, at night: nothing is lost to a reload, a kill, another tab, a lost line."""

import json
import os
import signal
from contextlib import contextmanager, suppress

import pytest

from tests.audio_checkpoints import make_audio_checkpoint
from tests.eventually import eventually
from tests.serving.server.running_server import start_server
from tests.serving.server.test_page_texts import LANGUAGES, table
from tests.serving.web.conftest import echo_server
from tests.serving.web.firefox import FIREFOX, firefox
from tests.serving.web.halting_engine import HALT
from tests.serving.web.test_browser import STORED
from tests.serving.web.test_kept import QUESTION, demo_server, engine_of, kill_all_of, plain
from tests.serving.web.test_pdf import pdf
from tests.serving.web.test_voice import STOP
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(FIREFOX is None, reason="there is no firefox here (Debian: apt-get install firefox-esr)"),
]
ANSWER = "article.assistant > .markdown"
LONG = "One two three four five six seven eight nine ten. "


@pytest.fixture(scope="module")
def browser():
    with firefox() as browser:
        yield browser


@pytest.fixture
def open_page(browser):
    """Opens pages that in the end have broken no policy."""
    opened = []

    def open_(url):
        page = browser.open(url)
        page.run(
            """() => addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) => {
              (globalThis.violations ??= []).push(`${violatedDirective} ${blockedURI}`);
            })"""
        )
        opened.append(page)
        until(lambda: is_there(page))
        return page

    yield open_
    violations = [page.run("() => globalThis.violations ?? []") for page in opened]
    for page in opened:
        page.run("() => { localStorage.clear(); sessionStorage.clear(); indexedDB.deleteDatabase('tokenmill'); }")
        page.close()
    assert violations == [[]] * len(opened)


def until(condition):
    eventually(condition, seconds=90)


def is_there(page):
    return page.run("() => Boolean(document.querySelector('.composer'))")


def ask(page, text):
    page.type("Your message", text)
    assert page.press("Send")


def said(page):
    return plain(page.text(ANSWER))


def is_over(page):
    return page.run("() => [...document.querySelectorAll('.composer button')].some((one) => one.innerText === 'Send')")


@pytest.fixture(scope="module")
def mill():
    with demo_server() as server:
        yield server


@pytest.fixture(scope="module")
def whole(mill):
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    return mill.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A server whose model repeats the prompt at 20 tokens a second."""
    with echo_server(tmp_path_factory, "firefox", {"step_seconds": 0.05}) as server:
        yield server


@pytest.fixture(scope="module")
def unending(tmp_path_factory):
    """The same, and its answers end when they are stopped."""
    with echo_server(tmp_path_factory, "unending", {"step_seconds": 0.05, "max_model_len": 1_000_000}) as server:
        yield server


@contextmanager
def stopped_in_the_middle(page, server):
    settings = json.dumps({"temperature": 0})
    page.run("(text) => localStorage.setItem('tokenmill-settings', text)", settings)
    page.reload()
    until(lambda: is_there(page))
    engine = engine_of(server)
    os.kill(engine, HALT)
    try:
        ask(page, QUESTION)
        until(lambda: len(said(page)) > 20)
        until(lambda: plain("".join(one["content"] for one in page.run(STORED, "parts"))).startswith(said(page)[:15]))
        yield said(page)
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)


def test_a_reload_in_mid_stream_goes_on(mill, whole, open_page):
    page = open_page(mill.url)
    with stopped_in_the_middle(page, mill) as early:
        page.reload()
        until(lambda: said(page).startswith(early[:15]))
        assert len(said(page)) < len(plain(whole))
    until(lambda: is_over(page) and said(page) == plain(whole))


def test_an_engine_that_is_killed_breaks_no_answer(mill, whole, open_page):
    page = open_page(mill.url)
    with stopped_in_the_middle(page, mill):
        os.kill(engine_of(mill), signal.SIGKILL)
    until(lambda: is_over(page) and said(page) == plain(whole))
    assert page.text("[role=alert]") == ""


def test_a_server_that_is_gone_is_waited_for(whole, open_page):
    with demo_server() as first:
        page, port = open_page(first.url), int(first.url.rpartition(":")[2])
        with stopped_in_the_middle(page, first):
            kill_all_of(first)
        until(lambda: "Waiting for the server" in page.text(".waits"))
    with demo_server(port=port):
        until(lambda: is_over(page) and said(page) == plain(whole))


def test_one_tab_writes_and_the_other_reads(unending, browser, open_page):
    page = open_page(unending.url)
    ask(page, LONG * 6)
    until(lambda: len(said(page)) > 10)
    other = open_page(unending.url)
    until(lambda: other.press(LONG.strip()[:48]) or other.press(title_of(other)))
    until(lambda: "Written by another tab" in other.text(".composer"))
    early = said(other)
    until(lambda: len(said(other)) > len(early))
    kept = said(page)
    page.goto(f"{unending.url}/web/icon.svg")  # the tab that is left goes on
    until(lambda: other.press("Stop"))
    until(lambda: is_over(other))
    assert said(other).startswith(kept[:20])
    page.goto(unending.url)


def test_two_hundred_conversations_are_taken_in_and_searched(slow, open_page):
    page = open_page(slow.url)
    text = json.dumps(
        [
            {"id": f"c{number}", "title": f"Number {number}", "messages": [one_message(f"needle-{number}")]}
            for number in range(200)
        ]
    )
    page.run(
        """(text) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([text], "many.json", { type: "application/json" }));
          const input = document.querySelector("input[type=file][aria-label=Import]");
          input.files = transfer.files;
          input.dispatchEvent(new Event("change", { bubbles: true }));
        }""",
        text,
    )
    count = "() => document.querySelectorAll('.list li').length"
    until(lambda: page.run(count) == 200)
    page.type("Search conversations", "needle-77")
    until(lambda: page.run(count) == 1 and page.text(".list li .title") == "Number 77")


def one_message(text):
    return {"id": 1, "parent": None, "role": "user", "content": text}


def title_of(page):
    return page.run("() => document.querySelector('.list li .title')?.innerText.trim() ?? ''")


def test_what_is_sent_without_a_line_is_answered_when_it_is_back(slow, open_page):
    page = open_page(slow.url)
    page.offline(True)
    ask(page, "are you there")
    until(lambda: "Waiting for the server" in page.text(".waits"))
    page.offline(False)
    until(lambda: "are you there" in said(page) and is_over(page))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_tab_is_shown_in_every_language(slow, open_page, language):
    page = open_page(slow.url)
    page.run("(language) => localStorage.setItem('tokenmill-language', language)", language)
    page.reload()
    until(lambda: is_there(page))
    texts = table(language)
    assert texts["composer.send"] in page.text(".composer")
    for tab, wanted in (("live", "engine.perfetto"), ("compare", "compare.ask"), ("api", "api.search")):
        page.run("(tab) => { location.hash = tab; }", tab)
        place = "() => [...document.querySelectorAll('main > :not([hidden])')].map((one) => one.innerHTML).join('')"
        until(lambda place=place, wanted=wanted: texts[wanted] in page.run(place))


def test_formulas_and_colours_of_code_are_shown(slow, open_page):
    page = open_page(slow.url)
    ask(page, "So $x^2$ and `a`")
    until(lambda: page.run("() => document.querySelectorAll('article.assistant .katex').length > 0"))


def test_a_diagram_is_drawn(slow, open_page):
    page = open_page(slow.url)
    ask(page, '```mermaid\npie\n "a" : 1\n```\n')
    until(lambda: is_over(page) and page.press("Draw"))
    until(lambda: page.run("() => (document.querySelector('img.diagram')?.naturalWidth ?? 0) > 50"))


def test_a_long_file_is_searched(slow, open_page):
    page = open_page(slow.url)
    text = "The wheel turns. " * 600 + "\n\nThe bishop owed eleven geese.\n\n" + "The sail turns. " * 600
    page.run(
        """(text) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([text], "mill.txt", { type: "text/plain" }));
          const input = document.querySelector("form.composer input[type=file]");
          input.files = transfer.files;
          input.dispatchEvent(new Event("change", { bubbles: true }));
        }""",
        text,
    )
    until(lambda: "passages" in page.text("form.composer .file"))
    ask(page, "geese of the bishop")
    until(lambda: "Sources" in page.text("article.assistant .sources"))
    assert "eleven geese" in page.run("() => document.querySelector('.sources').textContent")


def test_what_is_said_becomes_a_file_of_the_message(open_page, tmp_path):
    config = EngineConfig(model=str(make_audio_checkpoint(tmp_path / "hearing")), dtype="float32", num_pages=200)
    with start_server(config, ENGINE_MODULE) as hearing:
        page = open_page(hearing.url)
        until(lambda: "Record" in page.text("form.composer button[aria-pressed]"))
        page.run(f"() => {{ ({STOP})(document.querySelector('form.composer button[aria-pressed]')); }}")
        assert page.press("Record")
        until(lambda: ".wav" in page.text("form.composer .file"))
        assert page.text("[role=alert]") == ""


def test_a_pdf_is_read(slow, open_page):
    page = open_page(slow.url)
    page.run(
        """(text) => {
          const transfer = new DataTransfer();
          const bytes = Uint8Array.from(text, (one) => one.charCodeAt(0));
          transfer.items.add(new File([bytes], "mill.pdf", { type: "application/pdf" }));
          const input = document.querySelector("form.composer input[type=file]");
          input.files = transfer.files;
          input.dispatchEvent(new Event("change", { bubbles: true }));
        }""",
        pdf(["grinds grain"]).decode("latin-1"),
    )
    until(lambda: "mill.pdf" in page.text("form.composer .file"))
    until(lambda: "grinds grain" in page.run("() => document.querySelector('form.composer .file pre').textContent"))
