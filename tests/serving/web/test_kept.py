"""No word is lost: what was sent, an answer that was being written, drafts, and what was deleted by mistake."""

import json
import os
import re
import signal
from contextlib import contextmanager, suppress

import pytest

from tests.serving.server.running_server import free_port, start_server
from tests.serving.web.conftest import echo_server
from tests.serving.web.halting_engine import HALT
from tests.serving.web.test_browser import STORED, answers, ask, open_settings, until, use_key, wait_for_end
from tokenmill.config.configs import EngineConfig
from tokenmill.demo import demo_model_path

ENGINE_MODULE = "tests.serving.web.halting_engine"
QUESTION = "Tell me a story about a dog who goes to the river."


def demo_server(**server):
    return start_server(EngineConfig(model=str(demo_model_path()), dtype="float32"), ENGINE_MODULE, **server)


@pytest.fixture(scope="module")
def mill():
    """A server of the demo model."""
    with demo_server() as server:
        yield server


@pytest.fixture(scope="module")
def whole(mill):
    """The answer to the question that nobody interrupted."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    text = mill.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert len(text) > 200
    return text


def test_three_things_to_try_are_what_the_model_can_do(mill, open_page):
    page = open_page(mill.url, locale="de-DE")
    tries = page.locator(".tries button")
    until(page, lambda: "What is TokenMill?" in tries.all_inner_texts())
    assert tries.count() == 3
    tries.filter(has_text="What is TokenMill?").click()
    until(page, lambda: "serving engine" in said(page))


def plain(text):
    return re.sub(r"\s+", " ", text).strip()


def said(page):
    return plain(answers(page).last.locator(":scope > .markdown").inner_text())


def engine_of(server):
    return next(pid for name, pid in server.children().items() if name.startswith(ENGINE_MODULE))


def kill_all_of(server):
    for pid in [server.process.pid, *server.api_pids, *server.children().values()]:
        os.kill(pid, signal.SIGKILL)


def noted(page):
    """The text in the journal of answers that are being written."""
    return plain("".join(part["content"] for part in page.evaluate(STORED, "parts")))


@contextmanager
def stopped_in_the_middle(page, server):
    """Asks, and waits until some of the answer is shown; the engine stands still in its middle within."""
    open_settings(page)
    page.get_by_label("Temperature").fill("0")
    engine = engine_of(server)
    os.kill(engine, HALT)
    try:
        ask(page, QUESTION)
        until(page, lambda: len(said(page)) > 20)
        yield said(page)
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)


def test_a_reload_goes_on_with_the_same_answer(mill, whole, open_page):
    page = open_page(mill.url)
    with stopped_in_the_middle(page, mill) as early:
        until(page, lambda: noted(page).startswith(early[:15]))
        page.reload()
        until(page, lambda: answers(page).count() == 1 and said(page).startswith(early[:15]))
        assert len(said(page)) < len(plain(whole))
    wait_for_end(page)
    assert said(page) == plain(whole)
    page.reload()
    until(page, lambda: answers(page).count() == 1 and said(page) == plain(whole))


def test_an_engine_that_dies_breaks_no_answer(mill, whole, open_page):
    page = open_page(mill.url)
    with stopped_in_the_middle(page, mill):
        os.kill(engine_of(mill), signal.SIGKILL)
    wait_for_end(page)
    assert said(page) == plain(whole)
    assert page.get_by_role("alert").count() == 0


def test_a_server_that_is_started_anew_goes_on(whole, open_page):
    port = free_port()
    with demo_server(port=port) as first:
        page = open_page(first.url)
        with stopped_in_the_middle(page, first) as early:
            kill_all_of(first)
        page.get_by_text("Waiting for the server").wait_for()
        assert said(page).startswith(early[:15])
    with demo_server(port=port):
        wait_for_end(page)
        assert said(page) == plain(whole)


def test_a_server_that_ends_as_it_should_is_waited_for_too(open_page, tmp_path_factory):
    """Its streams end with an error; nothing that was shown is lost to it."""
    port, stub, name = free_port(), {"step_seconds": 0.05, "max_model_len": 1_000_000}, ("echo",)
    with echo_server(tmp_path_factory, "a", stub, port=port, shutdown_timeout=0.2, served_model_name=name) as first:
        page = open_page(first.url)
        ask(page, "One two three four five six seven. " * 3)
        until(page, lambda: answers(page).count() and len(said(page)) > 10)
        early = said(page)
        first.process.send_signal(signal.SIGINT)
        page.get_by_text("Waiting for the server").wait_for()
    with (
        echo_server(tmp_path_factory, "b", {"step_seconds": 0.002}, port=port, served_model_name=name),
        page.expect_request("**/v1/chat/completions") as sent,
    ):
        assert plain(sent.value.post_data_json["messages"][-1]["content"]).startswith(early[:10])
        wait_for_end(page)
        assert said(page).startswith(early[:10])
        assert page.get_by_role("alert").all_inner_texts() == []


def test_another_model_does_not_go_on_and_that_is_said(open_page, tmp_path_factory):
    port, stub = free_port(), {"step_seconds": 0.05, "max_model_len": 1_000_000}
    with echo_server(tmp_path_factory, "one", stub, port=port, served_model_name=("one",)) as first:
        page = open_page(first.url)
        ask(page, "One two three four five six seven. " * 3)
        until(page, lambda: answers(page).count() and len(said(page)) > 10)
        early = said(page)
        kill_all_of(first)
    with echo_server(tmp_path_factory, "other", {"step_seconds": 0.002}, port=port, served_model_name=("other",)):
        page.get_by_role("alert").get_by_text("one").wait_for()
        assert said(page).startswith(early[:10])
        page.locator(".bar .model").get_by_text("other").wait_for()
        answers(page).get_by_role("button", name="Continue").click()
        wait_for_end(page)
        assert page.get_by_role("alert").count() == 0


def test_what_is_sent_without_a_line_is_kept_and_answered_when_it_is_back(echo, open_page):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    page.context.set_offline(True)
    ask(page, "are you there")
    page.get_by_text("Waiting for the server").wait_for()
    page.context.set_offline(False)
    wait_for_end(page)
    assert "are you there" in said(page)
    assert page.get_by_role("article", name="You").count() == 1


def test_it_says_when_an_answer_cannot_go_on(slow_echo, open_page):
    page = open_page(slow_echo.url)
    use_key(page)
    open_settings(page)
    page.get_by_label(re.compile("schema", re.IGNORECASE)).fill('{"type": "object"}')
    ask(page, "one two three four five six seven")
    until(page, lambda: len(noted(page)) > 5)
    page.reload()
    page.get_by_role("alert").get_by_text("cannot go on from there: it has to match a schema as a whole").wait_for()
    assert len(said(page)) > 4


def test_one_tab_writes_and_the_others_read(slow_echo, open_page):
    page = open_page(slow_echo.url)
    use_key(page)
    ask(page, "One two three four five six seven eight nine ten. " * 5)
    until(page, lambda: len(said(page)) > 5)
    other = page.context.new_page()
    other.goto(slow_echo.url)
    use_key(other)
    other.get_by_role("button", name=re.compile("^One two three")).first.click()
    other.get_by_text("Written by another tab").wait_for()
    early = said(other)
    until(other, lambda: len(said(other)) > len(early))
    kept = said(page)
    page.goto(f"{slow_echo.url}/web/icon.svg")  # whoever is left goes on
    other.get_by_role("button", name="Stop").wait_for()
    other.get_by_role("button", name="Stop").click()
    other.get_by_role("button", name="Send").wait_for()
    assert said(other).startswith(kept[:20])
    assert other.evaluate("globalThis.violations ?? []") == []


def test_a_draft_the_open_conversation_and_settings_survive(echo, open_page):
    page = open_page(echo.url)
    open_settings(page)
    page.get_by_label("Top k").fill("3")
    ask(page, "first")
    wait_for_end(page)
    page.get_by_label("Your message").fill("half a thought")
    page.reload()
    until(page, lambda: answers(page).count() == 1)
    assert page.get_by_label("Your message").input_value() == "half a thought"
    page.get_by_role("button", name="New conversation").click()
    assert page.get_by_label("Your message").input_value() == ""
    page.get_by_label("Your message").fill("another")
    page.reload()
    until(page, lambda: page.get_by_label("Your message").input_value() == "another")
    open_settings(page)
    assert page.get_by_label("Top k").input_value() == "3"
    page.get_by_role("button", name="first", exact=True).click()
    until(page, lambda: page.get_by_label("Your message").input_value() == "half a thought")


def test_what_was_deleted_can_be_had_back_also_after_a_reload(echo, open_page):
    page = open_page(echo.url)
    ask(page, "dear words")
    wait_for_end(page)
    page.get_by_role("button", name="Delete dear words").click()
    until(page, lambda: page.get_by_role("button", name="dear words", exact=True).count() == 0)
    page.reload()
    page.get_by_text("Deleted “dear words”").wait_for()
    assert answers(page).count() == 0
    page.get_by_role("button", name="Undo").click()
    answers(page).get_by_text("dear words").wait_for()
    page.get_by_role("button", name="dear words", exact=True).wait_for()


def test_deleting_ends_what_is_being_written_and_can_be_undone(slow_echo, open_page):
    page = open_page(slow_echo.url)
    use_key(page)
    ask(page, "One two three four five six seven. " * 5)
    until(page, lambda: len(said(page)) > 5)
    page.get_by_role("button", name="Delete One two three").click()
    page.get_by_text("Deleted “One two three").wait_for()
    slow_echo.wait_until_unused()
    until(page, lambda: not any(head["isWriting"] for head in page.evaluate(STORED, "heads")))
    page.reload()
    page.get_by_role("button", name="Undo").click()
    until(page, lambda: len(said(page)) > 5)
    page.get_by_text("stopped").wait_for()


def test_two_hundred_conversations_are_listed_searched_and_renamed(echo, open_page, tmp_path):
    page = open_page(echo.url)
    many = [
        {
            "id": str(one),
            "title": f"Number {one}",
            "messages": [
                {"id": 1, "parent": None, "role": "user", "content": "word " * 200},
                {
                    "id": 2,
                    "parent": 1,
                    "role": "assistant",
                    "content": f"needle-{one} " * 200,
                },
            ],
        }
        for one in range(200)
    ]
    (tmp_path / "many.json").write_text(json.dumps(many))
    page.get_by_label("Import").set_input_files(tmp_path / "many.json")
    entries = page.get_by_label("Conversations").locator("li")
    until(page, lambda: entries.count() == 200)
    page.keyboard.press("Control+k")
    page.keyboard.type("NEEDLE-77")
    until(page, lambda: entries.count() == 1)
    page.get_by_role("button", name="Rename Number 77").click()
    page.keyboard.press("Control+a")
    page.keyboard.type("The one with the needle")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="The one with the needle", exact=True).wait_for()
    page.reload()
    until(page, lambda: entries.count() == 200)
    page.get_by_role("button", name="The one with the needle", exact=True).click()
    answers(page).get_by_text("needle-77").first.wait_for()


def test_a_full_store_is_said_and_what_is_shown_stays(echo, open_page):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    session = page.context.new_cdp_session(page)
    session.send("Storage.overrideQuotaForOrigin", {"origin": echo.url, "quotaSize": 1})
    ask(page, "too much " * 3)
    page.get_by_role("alert").get_by_text("This browser keeps no more").wait_for()
    wait_for_end(page)
    assert "too much" in said(page)


def test_conversations_of_an_older_page_are_found(echo, open_page):
    page = open_page(echo.url + "/version")  # where no page of today opens its own
    page.evaluate(
        """async () => {
          const request = indexedDB.open("tokenmill", 1);
          request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
          const database = await new Promise((resolve, reject) => {
            request.onsuccess = () => resolve(request.result);
            request.onerror = () => reject(request.error);
          });
          const messages = [{ id: 1, parent: null, role: "user", content: "an old word" }];
          const old = { id: "x", title: "Old", created: 1, updated: 1, messages, chosen: {}, settings: {} };
          const transaction = database.transaction("conversations", "readwrite");
          transaction.objectStore("conversations").put(old);
          await new Promise((resolve) => { transaction.oncomplete = resolve; });
          database.close();
        }"""
    )
    page.goto(echo.url)
    page.get_by_role("button", name="Old", exact=True).click()
    page.get_by_role("article", name="You").get_by_text("an old word").wait_for()
