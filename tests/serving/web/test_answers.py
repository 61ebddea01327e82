"""Answers that are more than text: thinking folded, calls of tools shown and answered by hand; and the keys."""

import json
import random
import re

import pytest

from tests.serving.server.running_proxy import start_proxy
from tests.serving.web.conftest import echo_server
from tests.serving.web.test_browser import answers, ask, open_settings, until, use_key, wait_for_end

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "mill"}}</tool_call>'


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A server that repeats the prompt, and finds thinking and calls of tools in it."""
    parsers = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with echo_server(tmp_path_factory, "thinking", {"step_seconds": 0.002}, **parsers) as server:
        yield server


def said(page):
    """The answer, without what was thought before it."""
    return answers(page).locator(":scope > .markdown").inner_text().strip()


def test_thinking_is_folded(thinking, open_page):
    page = open_page(thinking.url)
    ask(page, "I wonder</think>Yes.")
    wait_for_end(page)
    thoughts = answers(page).locator("details.reasoning")
    assert not thoughts.get_by_text("I wonder").is_visible()
    until(page, lambda: said(page).startswith("Yes."))
    thoughts.locator("summary").click()
    assert thoughts.get_by_text("I wonder").is_visible()


def test_calls_of_tools_are_shown_and_their_results_given(thinking, open_page):
    page = open_page(thinking.url)
    open_settings(page)
    page.get_by_label(re.compile("^Tools")).fill(json.dumps(TOOLS))
    page.get_by_label("Most tokens of an answer").fill("100")
    ask(page, f"</think>{CALL}")
    wait_for_end(page)
    call = answers(page).locator(".call")
    assert "calls look_up" in call.inner_text()
    assert json.loads(call.locator("pre").inner_text()) == {"word": "mill"}
    page.get_by_label("Result of look_up").fill("grinds grain")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    asked, called, result = sent.value.post_data_json["messages"]
    assert CALL in asked["content"]
    assert (result["role"], result["content"]) == ("tool", "grinds grain")
    assert [result["tool_call_id"]] == [one["id"] for one in called["tool_calls"]]
    wait_for_end(page)
    assert "grinds grain" in page.get_by_role("article", name="Result").inner_text()
    assert answers(page).count() == 2


def test_an_answer_may_have_to_match_a_schema(thinking, open_page):
    page = open_page(thinking.url)
    open_settings(page)
    schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    page.get_by_label(re.compile("schema", re.IGNORECASE)).fill(json.dumps(schema))
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "a word")
    given = sent.value.post_data_json["response_format"]
    assert (given["type"], given["json_schema"]["schema"]) == ("json_schema", schema)
    wait_for_end(page)


def test_an_edited_answer_shows_no_tokens_of_the_one_before(thinking, open_page):
    page = open_page(thinking.url)
    ask(page, "</think>first")
    wait_for_end(page)
    answers(page).get_by_role("button", name="Tokens").wait_for()
    answers(page).get_by_role("button", name="Edit").click()
    page.get_by_label("The message").fill("second")
    page.keyboard.press("Control+Enter")
    answers(page).get_by_text("2 of 2").wait_for()
    assert said(page) == "second"
    assert answers(page).get_by_role("button", name="Tokens").count() == 0
    answers(page).get_by_role("button", name="Earlier version").click()
    answers(page).get_by_role("button", name="Tokens").wait_for()


def test_keys_send_stop_and_begin_anew(slow_echo, open_page):
    page = open_page(slow_echo.url)
    use_key(page)
    box = page.get_by_label("Your message")
    box.fill("one")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    assert box.input_value() == "one\ntwo"
    box.press("Enter")
    page.get_by_role("button", name="Stop").wait_for()
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert "stopped" in answers(page).locator(".cost").inner_text()
    slow_echo.wait_until_unused()
    page.keyboard.press("Control+Shift+O")
    until(page, lambda: answers(page).count() == 0)
    page.get_by_role("heading", name=re.compile("^Ask ")).wait_for()


def test_a_stop_is_heard_before_the_answer_has_begun(slow_echo, open_page):
    page = open_page(slow_echo.url)
    use_key(page)
    page.get_by_label("Your message").fill("one")
    # The first task behind the one of the click, when no other tab was asked yet whether it writes.
    page.get_by_role("button", name="Send").evaluate("""async (send) => {
      send.click();
      for (let turn = 0; turn < 10; turn += 1) await null;
      dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    }""")
    answers(page).locator(".cost").get_by_text("stopped").wait_for()
    wait_for_end(page)
    assert page.get_by_role("article", name="You").count() == 1
    slow_echo.wait_until_unused()
    ask(page, "two")
    answers(page).last.get_by_text("two").first.wait_for()  # the next answer is not stopped by it
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)


def nested(rng: random.Random) -> str:
    """A text of some thousand openings, of one kind or mixed, and perhaps as many ends."""
    kinds = ["> ", ">", "- ", "1. ", "* ", "*a ", "**b ", "~~c ", "[", "_d", "***", "> - ", "+\t"]
    chosen = rng.sample(kinds, rng.randrange(1, 4))
    ends = rng.choice(["", " e*", " f**", "](u)", "~~"])
    return "".join(rng.choices(chosen, k=3000)) + "core" + ends * rng.choice([0, 3000])


def test_a_text_nested_without_end_is_shown_and_the_page_goes_on(echo, open_page):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    page = open_page(echo.url)
    texts = ["> " * 3000 + "core", *(nested(rng) for _ in range(6))]

    def answer(route):
        body = json.loads(route.request.post_data)
        text = texts[len(body["messages"]) // 2]
        deltas = [{"content": text[:2999]}, {"content": text[2999:]}]
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(status=200, content_type="text/event-stream", body=f"{lines}data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    for number in range(len(texts)):
        ask(page, f"question {number}")
        answers(page).nth(number).get_by_text("core").first.wait_for()
        wait_for_end(page)
    depth = "node => { let most = 0; for (const one of node.querySelectorAll('*')) { let depth = 0;"
    depth += " for (let up = one; up !== node; up = up.parentNode) depth += 1;"
    depth += " most = Math.max(most, depth); } return most; }"
    shown = page.locator(".markdown")
    assert max(shown.nth(number).evaluate(depth) for number in range(shown.count())) < 60
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "and now")
    answers(page).get_by_text("and now").first.wait_for()


def test_the_page_of_a_proxy_chats_through_it(echo, open_page):
    with start_proxy([echo.url], [echo.url]) as proxy:
        page = open_page(proxy.url)
        ask(page, "through the proxy")
        wait_for_end(page)
        assert "through the proxy" in said(page)
