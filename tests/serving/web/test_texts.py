"""Text as people know it: formulas, code with colours, tables; fetched when needed, harmless when hostile."""

import json

import pytest

from tests.serving.web.test_browser import answers, ask, until, wait_for_end

FORMULAS = r"""So $x^2 + y^2 = z^2$ holds, it costs $5 and $6, and \(\sqrt{a}\) too.

$$\int_0^1 x\,dx = \frac{1}{2}$$

\[ \sum_{n} n \]

| a | b |
|:--|--:|
| $q$ | `c` |"""
HOSTILE = (
    r"$\href{javascript:globalThis.hacked=1}{x}$ end",
    r"$\includegraphics{http://198.51.100.7/p.png}$ $\url{http://198.51.100.7/}$ end",
    r"$\htmlStyle{position:fixed}{x}$ $\htmlData{a=b}{x}$ $\rule{1000em}{1000em}$ end",
    r"$\def\a{\a\a}\a$ $\newcommand{\b}{\b\b}\b$ end",
    "$" + r"\frac{1}{" * 400 + "1" + "}" * 400 + "$ end",
    r"$<img src=x onerror=hacked=2>$ $\text{<script>hacked=3</script>}$ end",
    "$ " * 3000 + "end",
    r"\( " * 3000 + "end",
    "$$" + "x" * 5000 + " end",
)


@pytest.fixture
def told(echo, open_page):
    """Opens a page where the model says a given text, in two parts."""

    def open_(text, **how):
        page = open_page(echo.url, **how)

        def answer(route):
            half = len(text) // 2
            deltas = [{"content": text[:half]}, {"content": text[half:]}]
            events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
            events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            route.fulfill(status=200, content_type="text/event-stream", body=f"{lines}data: [DONE]\n\n")

        page.route("**/v1/chat/completions", answer)
        ask(page, "say it")
        wait_for_end(page)
        return page

    return open_


def test_formulas_are_set_and_prices_are_not(told):
    page = told(FORMULAS)
    answer = answers(page).locator(".markdown")
    until(page, lambda: answer.locator(".katex").count() == 5)
    assert answer.locator(".katex-display").count() == 2
    assert answer.locator("td .katex").count() == 1
    assert "it costs $5 and $6, and" in answer.inner_text()
    assert answer.locator("math").count() == 5, "for screen readers"
    fonts = page.evaluate("document.fonts.ready.then(() => [...document.fonts].some(one => one.status === 'loaded'))")
    assert fonts


def test_code_has_colours_is_copied_whole_and_wraps(told):
    code = 'def grind(corn):\n    return "flour"  # <b>fine</b>'
    page = told(f"```python\n{code}\n```\n\n```nonsense\nx\n```", permissions=["clipboard-read", "clipboard-write"])
    block = answers(page).locator(".code").first
    block.locator(".code-keyword").get_by_text("def").wait_for()
    assert block.locator(".code-string").inner_text() == '"flour"'
    assert block.locator("pre").inner_text() == code
    block.get_by_role("button", name="Copy").click()
    block.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code
    block.get_by_role("button", name="Wrap").click()
    assert block.locator("pre").evaluate("pre => getComputedStyle(pre).whiteSpace") == "pre-wrap"
    assert answers(page).locator(".code").nth(1).locator("span[class^=code-]").count() == 0


def test_what_no_text_needs_is_not_fetched(echo, open_page):
    page = open_page(echo.url)
    fetched = []
    page.on("request", lambda request: fetched.append(request.url))
    ask(page, "plain words with a price of $5")
    wait_for_end(page)
    assert not [url for url in fetched if "katex" in url or "highlight" in url]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_formulas_are_harmless(told, text):
    page = told(text)
    answer = answers(page).locator(".markdown")
    until(page, lambda: "end" in answer.inner_text())
    page.wait_for_timeout(300)
    assert page.evaluate("globalThis.hacked ?? null") is None
    assert answer.evaluate("node => node.querySelectorAll('a, img, script, iframe, [data-a]').length") == 0
    assert answer.evaluate("node => node.scrollHeight") < 30_000
    places = "node => [...node.querySelectorAll('*')].map(one => getComputedStyle(one).position)"
    assert "fixed" not in answer.evaluate(places)
