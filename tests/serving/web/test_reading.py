"""Reading while it writes: following and not, nothing that jumps, text that is drawn once."""

import json

import pytest

from tests.serving.web.conftest import echo_server
from tests.serving.web.test_browser import answers, ask, open_settings, until, wait_for_end

TEXT = "\n\n".join(f"line {number}" for number in range(30))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A server that repeats the prompt at a hundred tokens a second."""
    with echo_server(tmp_path_factory, "measured", {"step_seconds": 0.01}) as server:
        yield server


@pytest.fixture(scope="module")
def unending(tmp_path_factory):
    """The same, and its answers end when they are stopped, or have as many tokens as they may."""
    stub = {"step_seconds": 0.01, "max_model_len": 1_000_000}
    with echo_server(tmp_path_factory, "unending", stub) as server:
        yield server


def top(page):
    return page.locator(".messages").evaluate("box => box.scrollTop")


def from_end(page):
    return page.locator(".messages").evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight")


def height(page):
    return page.locator(".messages").evaluate("box => box.scrollHeight")


def rest(page):
    """Waits until nothing moves after a turn of the wheel, and returns the place."""
    places = [top(page)]

    def rests():
        page.wait_for_timeout(200)
        places.append(top(page))
        return places[-1] == places[-2]

    until(page, rests)
    return places[-1]


def test_scrolling_up_ends_following_and_a_button_returns(unending, open_page):
    page = open_page(unending.url, height=420)
    ask(page, TEXT)
    answers(page).get_by_text("line 2", exact=True).first.wait_for()
    until(page, lambda: from_end(page) < 2)
    page.locator(".messages").hover()
    page.mouse.wheel(0, -200)
    page.get_by_role("button", name="Follow the answer").wait_for()
    place, early = rest(page), height(page)
    until(page, lambda: height(page) > early + 40)
    assert top(page) == place, "what is read does not move"
    page.get_by_role("button", name="Follow the answer").click()
    later = height(page)
    until(page, lambda: height(page) > later)
    until(page, lambda: from_end(page) < 2)
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    page.locator(".messages").hover()
    page.mouse.wheel(0, -150)
    page.get_by_role("button", name="To the end").wait_for()
    place = rest(page)
    page.reload()
    answers(page).get_by_text("line 2", exact=True).first.wait_for()
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


# Draws a text that grows and ends, where each look at the clock takes a second: what is drawn has its time.
DRAWN = """async () => {
  const { Markdown } = await import("/web/markdown.js");
  const { html, render } = await import("/web/ui.js");
  let now = 0;
  performance.now = () => (now += 1000);
  const place = document.createElement("div");
  const draw = (text, isOpen) => render(html`<${Markdown} text=${text} isOpen=${isOpen} />`, place);
  draw("one", true);
  draw("one two", true);
  const early = place.textContent;
  draw("one two three", false);
  return [early, place.textContent];
}"""


def test_an_answer_that_is_over_is_shown_whole_at_once(echo, open_page):
    page = open_page(f"{echo.url}/#api")
    page.get_by_role("navigation").first.wait_for()
    assert page.evaluate(DRAWN) == ["one", "one two three"]


def test_the_page_says_what_comes_sentence_by_sentence(unending, open_page):
    page = open_page(unending.url)
    ask(page, "A first sentence. " * 12)
    heard = page.locator(".unseen[aria-live=polite]")
    until(page, lambda: heard.inner_text().strip().endswith("sentence."))
    page.get_by_role("button", name="Stop").click()
    until(page, lambda: "Stopped." in heard.inner_text())
    open_settings(page)
    page.get_by_label("Most tokens of an answer").fill("20")
    ask(page, "A second sentence.")
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


def test_a_stopped_answer_goes_on_where_it_stopped(unending, open_page):
    page = open_page(unending.url)
    ask(page, "one two three four five six seven eight nine ten")
    text = answers(page).locator(".markdown")
    until(page, lambda: text.count() and len(text.inner_text()) > 8)
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    kept = text.inner_text().strip()
    open_settings(page)
    page.get_by_label("Most tokens of an answer").fill("40")
    with page.expect_request("**/v1/chat/completions") as sent:
        answers(page).get_by_role("button", name="Continue").click()
    assert sent.value.post_data_json["messages"][-1]["content"].strip().replace("\n", "") in kept.replace("\n", "")
    wait_for_end(page)
    assert text.inner_text().startswith(kept[:8])
    assert len(text.inner_text()) > len(kept)
