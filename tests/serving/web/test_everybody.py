"""Everybody can use it: by keys alone, by touch, by ear, with less motion."""

import json
import re

import pytest

from tests.serving.web.test_browser import SERIOUS, answers, ask, until, wait_for_end
from tests.serving.web.test_texts import FORMULAS


def focused(page):
    return page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText")


def serious(page):
    base = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = base.Axe().run(page).response["violations"]
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] in SERIOUS]


def test_a_chat_is_had_by_keys_alone(echo, open_page):
    page = open_page(echo.url)
    until(page, lambda: focused(page) == "Your message")
    page.keyboard.type("by keys alone")
    page.keyboard.press("Enter")
    answers(page).get_by_text("by keys alone").first.wait_for()
    wait_for_end(page)
    assert focused(page) == "Your message"
    page.keyboard.press("Control+Shift+S")
    until(page, lambda: focused(page) != "Your message")
    page.keyboard.press("Escape")
    until(page, lambda: focused(page) == "Your message")
    page.keyboard.press("Control+k")
    assert focused(page) == "Search conversations"
    page.get_by_role("button", name="Delete by keys alone").wait_for(state="attached")
    for wanted in ("by keys alone", "Rename by keys alone", "Delete by keys alone"):
        page.keyboard.press("Tab")
        assert focused(page).strip() == wanted
    page.keyboard.press("Enter")
    page.get_by_text("Deleted “by keys alone”").wait_for()
    until(page, lambda: focused(page) == "Your message")
    page.get_by_role("button", name="Undo").focus()
    page.keyboard.press("Enter")
    answers(page).get_by_text("by keys alone").first.wait_for()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("dark", 380)])
def test_all_that_an_answer_shows_can_be_read_by_everybody(echo, open_page, scheme, width):
    text = FORMULAS + '\n\n```python\nclass A:  # note\n    x: int = f("a", 1)\n```\n\n> quote\n'
    page = open_page(echo.url, width=width, color_scheme=scheme)

    def answer(route):
        tops = [{"token": "a", "logprob": -0.5, "bytes": None}, {"token": "b", "logprob": -1.5, "bytes": None}]
        logprobs = {"content": [tops[0] | {"top_logprobs": tops}]}
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "length", "logprobs": logprobs}
        body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    ask(page, "one")
    answers(page).locator(".katex").nth(4).wait_for()
    answers(page).locator(".code-keyword").first.wait_for()
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
    answers(page).get_by_role("button", name="Tokens").click()
    answers(page).locator(".token").first.click()
    page.get_by_role("button", name="Go on with b").wait_for()
    if width < 500:
        page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Delete one").click()
    page.get_by_role("button", name="Undo").wait_for()
    assert serious(page) == []
    if width < 500:
        page.get_by_role("button", name="Close").click()
        until(page, lambda: page.get_by_role("button", name="Delete one").count() == 0)
    page.get_by_role("button", name="Undo").click()
    answers(page).locator(".katex").first.wait_for()


def test_a_phone_shows_no_keys_and_brings_no_keyboard_up(echo, open_page):
    page = open_page(echo.url, width=390, has_touch=True, is_mobile=True, reduced_motion="reduce")
    page.get_by_role("heading", name=re.compile("^Ask ")).wait_for()
    assert not page.get_by_text("begins a line").is_visible()
    assert page.evaluate("document.activeElement === document.body")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "one look"
    page.get_by_role("button", name="Tell me a short story about a dog.").tap()
    answers(page).get_by_text("story").first.wait_for()
    wait_for_end(page)
    moving = page.evaluate("document.getAnimations().length")
    assert moving == 0
