"""The page with several models: chosen, loaded, unloaded; presets, files, thinking, and two answers compared."""

import json
import re

import pytest

from tests.checkpoints import make_checkpoint
from tests.serving.models.many_models import many_models
from tests.serving.web.test_browser import answers, ask, open_settings, until, wait_for_end
from tests.serving.web.test_everybody import serious

NAMES = ("ant", "bee")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A server of two models that load when they are asked."""
    folder = tmp_path_factory.mktemp("several")
    for seed, name in enumerate(NAMES):
        make_checkpoint(folder / name, "qwen3", seed=seed)
    with many_models("--models-dir", str(folder), "--max-num-seqs", "4", "--num-pages", "200") as server:
        yield server


def entry(page, name):
    return (
        page.get_by_label("Models of this server")
        .locator(".models > li")
        .filter(has=page.get_by_label(name, exact=True))
    )


def test_a_model_is_chosen_loads_and_is_unloaded(two, open_page):
    page = open_page(two.url)
    button = page.locator(".bar .model")
    button.get_by_text("ant").wait_for()
    button.click()
    for name in NAMES:
        assert re.search(
            r"not loaded · .* on disk · .* of memory · [\d,]+ tokens of context", entry(page, name).inner_text()
        )
    assert serious(page) == []
    page.get_by_label("bee", exact=True).check()
    page.get_by_role("button", name="Load ant", exact=True).click()
    until(page, lambda: two.state("ant") == "ready")
    entry(page, "ant").get_by_text("ready").wait_for()
    assert two.state("bee") == "unloaded"
    page.get_by_role("button", name="Unload ant").click()
    entry(page, "ant").get_by_text("not loaded").wait_for()
    until(page, lambda: two.state("ant") == "unloaded")
    page.keyboard.press("Escape")
    button.get_by_text("bee").wait_for()
    open_settings(page)
    page.get_by_label("Most tokens of an answer").fill("4")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hello")
    assert sent.value.post_data_json["model"] == "bee"
    wait_for_end(page)
    assert "tokens" in answers(page).locator(".cost").inner_text()
    assert (two.state("bee"), two.state("ant")) == ("ready", "unloaded")
    page.reload()
    button.get_by_text("bee").wait_for()


def test_each_loaded_model_has_a_tab_of_its_engines(two, open_page):
    for name in NAMES:
        two.post(f"/models/{name}/load")
    two.wait_for(lambda: all(two.state(name) == "ready" for name in NAMES))
    page = open_page(f"{two.url}/#live")
    tabs = page.get_by_role("tablist", name="Models").get_by_role("tab")
    until(page, lambda: tabs.all_inner_texts() == list(NAMES))
    page.get_by_role("article", name="Engine 0").wait_for()
    two.complete("bee", [5, 6, 7], max_tokens=8)
    seen = page.get_by_role("article", name="Engine 0").get_by_text(re.compile(r"[1-9]\d* prefixes, "))
    assert seen.count() == 0, "what another model computes is not shown here"
    tabs.filter(has_text="bee").click()
    two.complete("bee", [7] * 40, max_tokens=8)
    steps = page.get_by_role("article", name="Engine 0").get_by_role("button", name="Download steps")
    until(page, steps.is_enabled)


def test_two_models_answer_the_same_question_with_the_same_seed(two, open_page):
    page = open_page(two.url)
    open_settings(page)
    page.get_by_label("Most tokens of an answer").fill("6")
    page.evaluate("location.hash = '#compare'")
    sides = page.get_by_role("group")
    sides.nth(1).get_by_role("combobox", name="Model").select_option("bee")
    page.get_by_label("One question for both").fill("Which of you is larger?")
    page.get_by_label("Compare").get_by_label("Seed").fill("77")
    bodies = []
    page.on("request", lambda one: one.url.endswith("/chat/completions") and bodies.append(one.post_data_json))
    page.get_by_role("button", name="Ask both").click()
    page.get_by_role("button", name="Keep both").click()
    page.get_by_role("button", name="Kept in the chat").wait_for()
    one, other = bodies
    assert (one["model"], other["model"], one["seed"]) == ("ant", "bee", 77)
    assert one | {"model": ""} == other | {"model": ""}
    texts = [page.get_by_role("article", name=f"Answer {side}").locator(".markdown").inner_text() for side in (1, 2)]
    page.evaluate("location.hash = '#chat'")
    page.get_by_role("button", name="Which of you is larger?", exact=True).click()
    assert answers(page).locator(".markdown").inner_text() == texts[1]
    answers(page).get_by_role("button", name="Earlier version").click()
    assert answers(page).locator(".markdown").inner_text() == texts[0]


def test_a_server_of_one_model_says_so(echo, open_page):
    page = open_page(echo.url)
    page.locator(".bar .model").click()
    page.get_by_text("This server has one model").wait_for()
    assert page.get_by_role("button", name=re.compile("^(Unl|L)oad ")).count() == 0


def test_presets_keep_settings_under_a_name(echo, open_page):
    page = open_page(echo.url)
    open_settings(page)
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("combobox", name="Thinking").select_option("on")
    page.get_by_label("Most tokens of thinking").fill("64")
    page.get_by_label("Name of the preset").fill("short")
    page.get_by_role("button", name="Save as a preset").click()
    page.get_by_label("System prompt").fill("Be long.")
    page.get_by_role("combobox", name="Thinking").select_option("off")
    page.reload()
    open_settings(page)
    assert page.get_by_label("System prompt").input_value() == "Be long."
    page.get_by_role("combobox", name="Preset").select_option("short")
    assert page.get_by_label("System prompt").input_value() == "Be short."
    page.keyboard.press("Escape")
    bodies = []
    page.on("request", lambda one: one.url.endswith("/chat/completions") and bodies.append(one.post_data_json))
    page.route("**/v1/chat/completions", said_in_full)
    ask(page, "hello")
    wait_for_end(page)
    (body,) = bodies
    assert (body["temperature"], body["thinking_token_budget"]) == (0.5, 64)
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    open_settings(page)
    page.get_by_role("combobox", name="Preset").select_option("short")
    page.get_by_role("button", name="Delete the preset").click()
    assert page.get_by_role("combobox", name="Preset").locator("option").all_inner_texts() == ["no preset"]


def said_in_full(route):
    choice = {"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    route.fulfill(status=200, content_type="text/event-stream", body=body)


def test_files_of_text_are_sent_as_text_and_others_are_refused(echo, open_page):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    box = page.locator("form.composer input[type=file]")
    code = 'print("```")\n'
    box.set_input_files([{"name": "mill.py", "mimeType": "text/x-python", "buffer": code.encode()}])
    composer = page.locator("form.composer")
    composer.get_by_text("mill.py").wait_for()
    box.set_input_files([{"name": "a.bin", "mimeType": "application/octet-stream", "buffer": b"\0\xff"}])
    page.get_by_role("alert").get_by_text("a.bin: this is no text").wait_for()
    box.set_input_files([{"name": "a.png", "mimeType": "image/png", "buffer": b"\x89PNG"}])
    page.get_by_role("alert").get_by_text("a.png: this model takes no images").wait_for()
    box.set_input_files([{"name": "gone.txt", "mimeType": "text/plain", "buffer": b"gone"}])
    page.get_by_role("button", name="Remove gone.txt").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "what is it")
    content = sent.value.post_data_json["messages"][0]["content"]
    assert content == f"mill.py\n````\n{code}````\n\nwhat is it"
    wait_for_end(page)
    asked = page.get_by_role("article", name="You")
    asked.get_by_text("mill.py").click()
    assert code.strip() in asked.locator(".file pre").inner_text()
    assert composer.get_by_text("mill.py").count() == 0
    page.reload()
    asked.get_by_text("mill.py").wait_for()
