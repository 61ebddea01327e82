"""The page in a real browser: what a person does with it, and what a hostile model may not do with them."""

import ast
import json
import re

import pytest

from tests.engine.scheduler.harness import Harness
from tests.eventually import eventually
from tests.serving.web.conftest import KEY, PATIENCE_MS

HOSTILE = (
    '<img src=x onerror="globalThis.hacked=1"><script>globalThis.hacked=2</script><style>*{}</style> **b**',
    '<svg onload=hacked=3><iframe src="http://198.51.100.7/"></iframe> ![b](http://198.51.100.7/p.png) **b**',
    '[a](javascript:globalThis.hacked=4) [d](http://198.51.100.7/e) <a href="data:,x" onclick="hacked=5">c</a>',
    '```"><script>hacked=6</script>\nprint("<b onclick=hacked=7>")\n```\n**b**',
)


# All that the page keeps in one of its tables.
STORED = """(table) => new Promise((resolve) => {
  const request = indexedDB.open("tokenmill");
  request.onsuccess = () => {
    const all = request.result.transaction(table).objectStore(table).getAll();
    all.onsuccess = () => { request.result.close(); resolve(all.result); };
  };
})"""


def open_settings(page):
    page.get_by_label("Your message").wait_for()  # keys do nothing before there is a page
    page.keyboard.press("Control+Shift+S")


def ask(page, text):
    page.get_by_label("Your message").fill(text)
    page.get_by_role("button", name="Send").click()


def answers(page):
    return page.locator("article.assistant")


def wait_for_end(page):
    page.get_by_role("button", name="Send").wait_for()


def until(page, condition):
    """The page's policy lets nobody evaluate a condition in it again and again, so it is asked from here."""
    eventually(condition, seconds=PATIENCE_MS / 1000, pause=lambda seconds: page.wait_for_timeout(1000 * seconds))


def hold_clock(page):
    """Let what the page shows for a moment stay until `page.clock.run_for`."""
    page.clock.install()
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)


def use_key(page):
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use this key").click()


def test_an_answer_streams_stops_and_is_kept(slow_echo, open_page):
    page = open_page(slow_echo.url)
    use_key(page)
    ask(page, "One two three four five six seven eight nine ten. " * 3)
    text = answers(page).locator(".markdown")
    text.wait_for()
    until(page, lambda: len(text.inner_text()) > 5)
    early = text.inner_text()
    until(page, lambda: len(text.inner_text()) > len(early))
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    assert "stopped" in answers(page).locator(".cost").inner_text()
    slow_echo.wait_until_unused()
    kept = text.inner_text()
    page.reload()
    page.get_by_role("button", name=re.compile("^One two three")).first.click()
    until(page, lambda: text.inner_text() == kept)


def test_a_bar_shows_how_far_a_prompt_is_computed(endless, open_page):
    page = open_page(endless.url)
    ask(page, "One two three")
    bar = answers(page).locator("progress")
    bar.wait_for()
    most, done = (int(bar.get_attribute(name)) for name in ("max", "value"))
    assert most // 2 == done > 0
    assert "prompt tokens, 3 s left" in answers(page).locator(".cost").inner_text()
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    assert bar.count() == 0


def test_it_asks_for_the_key_and_keeps_it_in_the_tab(slow_echo, open_page):
    page = open_page(slow_echo.url)
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    dialog.wait_for()
    use_key(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_placeholder("1", exact=True).first.wait_for()  # a default, of which only the server could tell
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + location.href + document.cookie")
    page.evaluate("location.hash = '#live'")
    page.get_by_role("article", name="Engine 0").wait_for()


def test_a_late_refusal_of_no_key_does_not_ask_for_it_again(slow_echo, open_page):
    page = open_page(f"{slow_echo.url}/web/icon.svg")
    held = []

    def hold(route):
        if held or "authorization" in route.request.headers:
            route.continue_()
        else:
            held.append(route)

    page.route("**/openapi.json", hold)
    page.goto(f"{slow_echo.url}/#api")
    until(page, lambda: held)
    use_key(page)
    page.locator("details.route").first.wait_for()  # asked with the key, what was held is not answered yet
    with page.expect_response(lambda reply: reply.status == 401):
        held[0].continue_()
    page.get_by_role("link", name="Chat").click()
    page.get_by_label("Your message").fill("one")
    assert page.get_by_role("dialog").count() == 0


@pytest.mark.parametrize("text", HOSTILE, ids=("script", "picture", "link", "code"))
def test_hostile_text_of_a_model_is_only_text(echo, open_page, text):
    page = open_page(echo.url)
    ask(page, text)
    wait_for_end(page)
    answer = answers(page).locator(".markdown")
    assert "hacked" in answer.inner_text() or "](javascript" in text or "198.51.100.7" in answer.inner_html()
    assert page.evaluate("globalThis.hacked ?? null") is None
    names = answer.evaluate("node => [...new Set([...node.querySelectorAll('*')].map(one => one.localName))]")
    assert set(names) <= {"p", "br", "a", "strong", "code", "pre", "div", "span", "button"}
    assert ("strong" in names) == ("**" in text)
    links = answer.evaluate("node => [...node.querySelectorAll('a')].map(one => [one.getAttribute('href'), one.rel])")
    assert bool(links) == ("](" in text)
    assert all(href is None or href.startswith("http://198.51.100.7/") for href, _ in links)
    assert all(rel == "noopener noreferrer" for _, rel in links)
    assert answer.evaluate("node => [...node.querySelectorAll('*')].every(one => !one.getAttributeNames().some("
                           "name => name.startsWith('on') || name === 'style'))")  # fmt: skip


def test_editing_and_asking_again_make_branches(echo, open_page):
    page = open_page(echo.url)
    ask(page, "first question")
    wait_for_end(page)
    answers(page).get_by_role("button", name="Regenerate").click()
    answers(page).get_by_text("2 of 2").wait_for()
    wait_for_end(page)
    page.get_by_role("article", name="You").get_by_role("button", name="Edit").click()
    page.get_by_label("The message").fill("second question")
    page.get_by_role("button", name="Save as a branch").click()
    page.get_by_role("article", name="You").get_by_text("2 of 2").wait_for()
    wait_for_end(page)
    assert "second question" in answers(page).inner_text()
    page.get_by_role("article", name="You").get_by_role("button", name="Earlier version").click()
    assert "first question" in answers(page).inner_text()
    answers(page).get_by_role("button", name="Earlier version").click()
    assert "1 of 2" in answers(page).inner_text()


def test_a_token_shows_its_alternatives_and_an_answer_its_cost(echo, open_page):
    page = open_page(echo.url)
    ask(page, "hello")
    wait_for_end(page)
    assert re.search(r"\d+ prompt tokens, \d+ cached · \d+ tokens · [\d.,]+ tokens/s", answers(page).inner_text())
    answers(page).get_by_role("button", name="Tokens").click()
    answers(page).locator(".token").nth(1).click()
    rows = page.get_by_label("Alternatives").locator("tr")
    assert rows.count() == 2
    assert "60.65 %" in rows.first.inner_text()


def test_settings_go_with_the_request_and_can_be_copied(echo, open_page):
    page = open_page(echo.url, permissions=["clipboard-read", "clipboard-write"])
    open_settings(page)
    page.get_by_label("System prompt").fill("Don't be long.")
    page.get_by_label("Most tokens of an answer").fill("7")
    page.get_by_label("Top k").fill("3")
    page.get_by_label(re.compile("^Tools")).fill(
        json.dumps([{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}])
    )
    page.get_by_label(re.compile("^Keep the")).uncheck()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hello there, this is a longer message")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Don't be long."}
    assert (body["max_tokens"], body["top_k"], body["tools"][0]["function"]["name"]) == (7, 3, "look_up")
    assert "logprobs" not in body
    wait_for_end(page)
    page.get_by_text("1 tools that the model may call").wait_for()
    hold_clock(page)
    for kind, name in (("curl", "Copy as curl"), ("Python", "Copy as Python")):
        page.get_by_role("button", name=name).click()
        page.get_by_role("button", name="Copied").wait_for()
        text = page.evaluate("navigator.clipboard.readText()")
        assert echo.url in text, kind
        assert "max_tokens" in text
        if kind == "Python":
            ast.parse(text)
        page.clock.run_for(1200)
        page.get_by_role("button", name=name).wait_for()


def test_conversations_leave_and_come_back_as_files(echo, open_page, tmp_path):
    page = open_page(echo.url)
    ask(page, "to be kept")
    wait_for_end(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "conversations.json")
    other = open_page(echo.url)
    other.get_by_label("Import").set_input_files(tmp_path / "conversations.json")
    other.get_by_role("article", name="You").get_by_text("to be kept").wait_for()
    for number, fields in enumerate(({"parent": 7}, {"calls": 5}, {"images": ["http://198.51.100.7/p.png"]})):
        message = {"id": 1, "parent": None, "role": "assistant", "content": "x"} | fields
        broken = tmp_path / f"broken-{number}.json"
        broken.write_text(json.dumps([{"id": "x", "messages": [message]}]))
        other.get_by_label("Import").set_input_files(broken)
        other.get_by_role("alert").get_by_text(f"broken-{number}.json: a message of this file is damaged").wait_for()


def test_the_reference_tries_routes_out(echo, open_page):
    page = open_page(f"{echo.url}/docs")
    route = page.locator("details.route").filter(has_text="POST /tokenize")
    route.locator("summary").click()
    route.get_by_label("Body", exact=True).fill('{"prompt": "hello"}')
    route.get_by_role("button", name="Try it").click()
    route.get_by_role("status").get_by_text("200").wait_for()
    route.locator(".answer pre").get_by_text('"count"').wait_for()
    route.get_by_label("Body", exact=True).fill("{")
    route.get_by_role("button", name="Try it").click()
    route.get_by_text("400 Bad Request").wait_for()


@pytest.mark.parametrize("tab", ["chat", "compare", "live", "api"])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 380)])
def test_everybody_can_use_it(echo, open_page, tab, scheme, width):
    base = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(f"{echo.url}/#{tab}", width=width, color_scheme=scheme)
    if tab == "chat":
        ask(page, "A [link](http://198.51.100.7/), `code`\n\n```python\nprint(1)\n```")
        wait_for_end(page)
        page.get_by_role("button", name="Settings").click()
    elif tab == "live":
        page.get_by_role("article", name="Engine 0").wait_for()
    elif tab == "compare":
        page.get_by_label("One question for both").fill("What is a mill?")
        page.get_by_role("button", name="Ask both").click()
        page.get_by_role("button", name="Keep both").wait_for()
    else:
        page.locator("details.route summary").first.click()
    found = base.Axe().run(page).response["violations"]
    serious = [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] in SERIOUS]
    assert serious == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"


SERIOUS = ("serious", "critical")


def test_the_engine_is_seen_at_work(busy, open_page, tmp_path):
    page = open_page(f"{busy.url}/#live")
    engine = page.get_by_role("article", name="Engine 0")
    engine.wait_for()
    facts = engine.locator(".facts")
    until(page, lambda: re.search(r"[1-9]\d* running\s+[1-9]\d* waiting", facts.inner_text()))
    queue = engine.get_by_role("region", name="Requests")
    queue.get_by_role("row").nth(1).wait_for()
    until(page, lambda: "page" in queue.inner_text() or "row" in queue.inner_text())
    until(page, lambda: is_painted(engine.get_by_role("img", name=re.compile("^Timeline")), "--decode"))
    # How strong a prefix is painted depends on its age.
    engine.get_by_text(re.compile(r"[1-9]\d* prefixes, ")).wait_for()
    engine.get_by_text("The largest as a table").click()
    engine.get_by_role("region", name="Cached prefixes").get_by_role("row").nth(1).wait_for()
    panel = engine.get_by_role("region", name="Request")

    from playwright.sync_api import TimeoutError as NotThere  # whoever has no browser has no playwright

    def shows_a_request():
        queue.get_by_role("button").first.click()
        try:  # one that has ended meanwhile has nothing to show
            panel.get_by_text(re.compile("arrived with|waits")).first.wait_for(timeout=PATIENCE_MS / 10)
        except NotThere:
            return False
        return True

    until(page, shows_a_request)
    page.get_by_role("button", name="Pause").click()
    with page.expect_download() as download:
        engine.get_by_role("button", name="For Perfetto").click()
    download.value.save_as(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("step ") for event in trace) > 10
    assert all(event["dur"] >= 0 for event in trace if event["ph"] == "X")
    with page.expect_download() as download:
        engine.get_by_role("button", name="Download steps").click()
    download.value.save_as(tmp_path / "steps.jsonl")
    page.get_by_label("Open a step log").set_input_files(tmp_path / "steps.jsonl")
    page.get_by_text("steps.jsonl").wait_for()
    assert is_painted(engine.get_by_role("img", name=re.compile("^Timeline")), "--decode")
    page.get_by_role("button", name="Back to the engines").click()
    page.get_by_role("button", name="Go on").click()


def test_a_step_log_of_a_server_is_opened(busy, open_page, tmp_path):
    """The same page shows what `--step-log` has written."""
    harness = Harness(log=tmp_path / "log", num_pages=40)
    for _ in range(6):
        harness.add([1, 2, 3] * 3, 4)
    harness.drain()
    harness.engine.close()
    page = open_page(f"{busy.url}/#live")
    page.get_by_label("Open a step log").set_input_files(tmp_path / "log")
    page.get_by_text("log", exact=True).wait_for()
    timeline = page.get_by_role("article", name="Engine 0").get_by_role("img", name=re.compile("^Timeline"))
    assert is_painted(timeline, "--decode")
    assert is_painted(timeline, "--prefill")
    (tmp_path / "none").write_bytes(b"\0\0\0\2ab")
    page.get_by_label("Open a step log").set_input_files(tmp_path / "none")
    page.get_by_role("alert").get_by_text("none:").wait_for()


def is_painted(canvas, variable) -> bool:
    """Some pixels have this colour of the style sheet."""
    return canvas.evaluate(
        """(canvas, variable) => {
          const probe = document.createElement("i");
          probe.style.color = `var(${variable})`;
          document.body.append(probe);
          const wanted = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
          probe.remove();
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let count = 0;
          for (let at = 0; at < data.length; at += 4) {
            count += data[at + 3] === 255 && wanted.every((value, index) => data[at + index] === value);
          }
          return count > 20;
        }""",
        variable,
    )
