"""Reading while it writes: following and not, nothing that jumps, text that is drawn once."""

import json

import pytest

from tests.serving.web.conftest import echo_server
from tests.serving.web.test_browser import answers, ask, until, wait_for_end

TEXT = "\n\n".join(f"line {number}" for number in range(30))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A server that repeats the prompt at a hundred tokens a second."""
    with echo_server(tmp_path_factory, "measured", {"step_seconds": 0.01}) as server:
        yield server


def top(page):
    return page.locator(".messages").evaluate("box => box.scrollTop")


def from_end(page):
    return page.locator(".messages").evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight")


def height(page):
    return page.locator(".messages").evaluate("box => box.scrollHeight")


def test_scrolling_up_ends_following_and_a_button_returns(measured, open_page):
    page = open_page(measured.url, height=420)
    ask(page, TEXT)
    answers(page).get_by_text("line 2", exact=True).wait_for()
    assert from_end(page) < 2
    page.locator(".messages").hover()
    page.mouse.wheel(0, -200)
    page.get_by_role("button", name="Follow the answer").wait_for()
    place, early = top(page), height(page)
    until(page, lambda: height(page) > early + 40)
    assert top(page) == place, "what is read does not move"
    page.get_by_role("button", name="Follow the answer").click()
    assert from_end(page) < 2
    later = height(page)
    until(page, lambda: height(page) > later)
    assert from_end(page) < 2
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    page.locator(".messages").hover()
    page.mouse.wheel(0, -150)
    page.get_by_role("button", name="To the end").wait_for()
    place = top(page)
    page.reload()
    answers(page).get_by_text("line 2", exact=True).wait_for()
    until(page, lambda: abs(top(page) - place) < 2)


def test_what_is_drawn_is_not_drawn_again(measured, open_page):
    """A marked word, or a link that is followed, is not lost to the next token."""
    page = open_page(measured.url)
    parts = ("# Title", "**first** paragraph", "1. one\n2. two", "```py\nx = 1\n```", "| a | b |\n|---|---|\n| 1 | 2 |")
    ask(page, "\n\n".join(parts) + "\n\nlast")
    first = answers(page).locator("strong").first
    first.wait_for()
    first.evaluate("node => { node.ours = 1; getSelection().selectAllChildren(node); }")
    answers(page).locator("table td").first.wait_for()
    wait_for_end(page)
    assert first.evaluate("node => [node.ours, String(getSelection())]") == [1, "first"]
    names = (
        answers(page)
        .locator(".markdown")
        .evaluate("node => [...new Set([...node.querySelectorAll('*')].map(one => one.localName))]")
    )
    assert {"h1", "p", "strong", "ol", "li", "pre", "code", "table", "th", "td"} <= set(names)


def test_links_defined_later_and_long_lists_come_out_as_one_read(echo, open_page):
    page = open_page(echo.url)
    items = "\n".join(f"{number}. item {number}" for number in range(1, 6))
    ask(page, f"see [this][a] &amp; that\n\n{items}\n\n[a]: http://198.51.100.7/a")
    wait_for_end(page)
    answer = answers(page).locator(".markdown")
    link = answer.locator("a").first
    assert (link.inner_text(), link.get_attribute("href")) == ("this", "http://198.51.100.7/a")
    assert "this & that" in answer.inner_text()
    assert answer.locator("li").filter(has_text="item").count() >= 5


def test_the_page_says_what_comes_sentence_by_sentence(measured, open_page):
    page = open_page(measured.url)
    ask(page, "A first sentence. " * 12)
    heard = page.locator(".unseen[aria-live=polite]")
    until(page, lambda: heard.inner_text().strip().endswith("sentence."))
    wait_for_end(page)
    until(page, lambda: "The answer is complete." in heard.inner_text())


def test_an_answer_goes_on_from_another_token(measured, open_page):
    page = open_page(measured.url)

    def answer(route):
        asked = route.request.post_data_json
        if asked["messages"][-1]["role"] == "assistant":
            return route.continue_()
        tops = [{"token": text, "logprob": -0.5 - n, "bytes": None} for n, text in enumerate([" cat", " dog"])]
        words = ["The", " cat", " sleeps."]
        chunks = [
            {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None, "logprobs": {"content": [
                {"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": tops if word == " cat" else []}]}}]}
            for word in words
        ]  # fmt: skip
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return route.fulfill(status=200, content_type="text/event-stream", body=f"{lines}data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    ask(page, "what")
    answers(page).get_by_text("The cat sleeps.").wait_for()
    wait_for_end(page)
    answers(page).get_by_role("button", name="Tokens").click()
    answers(page).locator(".token").nth(1).click()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Go on with dog").click()
    body = sent.value.post_data_json
    assert body["messages"][-1] == {"role": "assistant", "content": "The dog"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    answers(page).get_by_text("2 of 2").wait_for()
    wait_for_end(page)
    assert answers(page).inner_text().count("The dog") >= 1
    answers(page).get_by_role("button", name="Earlier version").click()
    answers(page).get_by_text("The cat sleeps.").wait_for()


def test_a_stopped_answer_goes_on_where_it_stopped(measured, open_page):
    page = open_page(measured.url)
    ask(page, "one two three four five six seven eight nine ten")
    text = answers(page).locator(".markdown")
    until(page, lambda: text.count() and len(text.inner_text()) > 8)
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    kept = text.inner_text().strip()
    with page.expect_request("**/v1/chat/completions") as sent:
        answers(page).get_by_role("button", name="Continue").click()
    assert sent.value.post_data_json["messages"][-1]["content"].strip().replace("\n", "") in kept.replace("\n", "")
    wait_for_end(page)
    assert text.inner_text().startswith(kept[:8])
    assert len(text.inner_text()) > len(kept)
