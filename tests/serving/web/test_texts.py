"""Text as people know it: formulas, code with colours, tables, diagrams; fetched when needed, harmless when hostile."""

import json

import pytest

from tests.serving.web.test_browser import answers, ask, hold_clock, until, wait_for_end

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

FLOW = "graph TD\n  A[Grain] --> B(Mill)\n  B --> C{Fine?}"
# Scripts, pictures of strangers and handlers, by all that mermaid's grammar lets through.
STRANGER = "http://198.51.100.7"
HOSTILE_DIAGRAMS = (
    f'graph TD\n  A["<img src={STRANGER}/p onerror=parent.hacked=1>"] --> B["<script>parent.hacked=2</script>"]',
    'graph TD\n  A --> B\n  click A href "javascript:parent.hacked=3"\n  click B call hack()',
    f'%%{{init: {{"securityLevel": "loose", "htmlLabels": true, "themeCSS": "* {{ fill: url({STRANGER}/f) }}"}}}}%%\n'
    'graph TD\n  A["<b onclick=parent.hacked=4>x</b>"] --> B',
    f'%%{{init: {{"themeVariables": {{"lineColor": "red; background: url({STRANGER}/g)"}}}}}}%%\ngraph TD\n  A --> B',
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
    until(page, lambda: page.evaluate("[...document.fonts].some(one => one.status === 'loaded')"))


def test_code_has_colours_is_copied_whole_and_wraps(told):
    code = 'def grind(corn):\n    return "flour"  # <b>fine</b>'
    page = told(f"```python\n{code}\n```\n\n```nonsense\nx\n```", permissions=["clipboard-read", "clipboard-write"])
    block = answers(page).locator(".code").first
    block.locator(".code-keyword").get_by_text("def").wait_for()
    assert block.locator(".code-string").inner_text() == '"flour"'
    assert block.locator("pre").inner_text() == code
    hold_clock(page)
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


def drawing(page):
    return page.locator("img.diagram")


def draw(told, text):
    page = told(f"See:\n\n```mermaid\n{text}\n```\n\nend")
    page.get_by_role("button", name="Draw").click()
    return page


def size_of(page):
    return drawing(page).evaluate("image => [image.naturalWidth, image.naturalHeight]")


def test_a_diagram_is_text_until_it_is_wanted(told):
    page = told(f"```mermaid\n{FLOW}\n```\n\nend")
    button = page.get_by_role("button", name="Draw")
    button.wait_for()
    assert page.locator("iframe").count() == drawing(page).count() == 0
    button.click()
    drawing(page).wait_for()
    until(page, lambda: min(size_of(page)) > 0)
    width, height = size_of(page)
    assert 50 < width < height, "three boxes, one below the other"
    assert drawing(page).get_attribute("alt") == FLOW
    button.click()
    assert page.locator(".code pre").inner_text() == FLOW


@pytest.mark.parametrize("text", HOSTILE_DIAGRAMS)
def test_a_hostile_diagram_is_a_picture(told, text):
    page = draw(told, text)
    drawing(page).wait_for()
    until(page, lambda: min(size_of(page)) > 0)
    page.wait_for_timeout(500)
    assert page.evaluate("globalThis.hacked ?? 0") == 0
    (frame,) = [one for one in page.frames if one.url.endswith("/web/diagram.html")]
    assert frame.evaluate("globalThis.origin") == "null"
    reached = """async () => {
      const tried = await Promise.allSettled([fetch("/v1/models"), fetch("http://198.51.100.7/")]);
      let store = "open";
      try { localStorage.getItem("x"); } catch { store = "closed"; }
      return [...tried.map(({ status }) => status), store];
    }"""
    assert frame.evaluate(reached) == ["rejected", "rejected", "closed"]


def test_what_is_no_diagram_says_why_and_stays_text(told):
    page = draw(told, "graph TD\n  A --> --> B")
    page.get_by_role("alert").get_by_text("This diagram cannot be drawn").wait_for()
    assert "A --> --> B" in page.locator(".code pre").inner_text()
    assert drawing(page).count() == 0


def test_several_are_drawn_by_one_frame(told):
    page = told("\n\n".join(f'```mermaid\npie\n  title {name}\n  "x" : {name}\n```' for name in (1, 2, 3)) + "\n\nend")
    buttons = page.get_by_role("button", name="Draw")
    buttons.last.wait_for()
    for number in range(3):
        buttons.nth(number).click()
    until(page, lambda: drawing(page).count() == 3)
    assert page.locator("iframe").count() == 1
