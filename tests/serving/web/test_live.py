"""The tab of the engines: the same for who was there from the start and who comes midway."""

import itertools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.scheduler.harness import Harness
from tests.eventually import patience
from tests.serving.server.running_server import start_server
from tests.serving.web.conftest import keep_asking
from tests.serving.web.test_browser import hold_clock, until, use_key
from tests.serving.web.test_everybody import serious
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

NUM_CLIENTS = 6
# More than come in one report, and more than are kept.
MOST_TURNS_SEEN = 1300
STEP = 11  # where an iteration says which step it launched
NO_STEP = "turn without a step"


@pytest.fixture
def worked(tmp_path):
    """A server of a real engine that a few clients ask until the block ends, one of them for a very long answer."""
    checkpoint = make_checkpoint(tmp_path / "tiny", "qwen3", max_position_embeddings=4096)
    engine = EngineConfig(model=str(checkpoint), num_pages=400, max_num_seqs=4, max_num_batched_tokens=32)
    is_over = threading.Event()
    with start_server(engine, ENGINE_MODULE) as server, ThreadPoolExecutor(NUM_CLIENTS + 1) as clients:
        try:
            clients.submit(ask_long, server.url, is_over)
            for number in range(NUM_CLIENTS):
                clients.submit(keep_asking, server.url, number, is_over)
            yield server
        finally:
            is_over.set()
            server.post("/resume")


def ask_long(url, is_over):
    """One request that is older than all iterations that are kept."""
    body = {"prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}
    while not is_over.is_set():
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=patience(600)) as reply:
            for _ in reply.iter_lines():
                if is_over.is_set():
                    return


def turns_of(url):
    """All iterations that the server has kept, as it tells of them."""
    turns = []
    with httpx.stream("GET", f"{url}/live", timeout=30) as reply:
        for line in reply.iter_lines():
            frame = json.loads(line[6:]) if line.startswith("data: ") else {}
            turns += frame.get("turns", ())
            if frame.get("is_behind") is False:
                break
    return turns


def trace_of(page, path):
    """The steps and lanes that a page shows, by its own export; lanes that have not ended without how long they are."""
    with page.expect_download() as download:
        page.get_by_role("article", name="Engine 0").get_by_role("button", name="For Perfetto").click()
    download.value.save_as(path)
    events = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "X"]
    is_open = [one["tid"] > 0 and not one["args"]["end"] for one in events]
    return sorted(
        (one["tid"], one["ts"], one["name"], -1 if open_ else one["dur"])
        for one, open_ in zip(events, is_open, strict=True)
    )


def test_a_page_that_is_opened_midway_shows_what_one_from_the_start_shows(worked, open_page, tmp_path):
    early = open_page(f"{worked.url}/#live")
    early.get_by_role("article", name="Engine 0").wait_for()
    until(early, lambda: (turns := turns_of(worked.url)) and turns[-1][0] > MOST_TURNS_SEEN)
    worked.post("/pause?mode=keep&clear_cache=false")  # all open requests stay where they are

    def shows_all(page):
        names = [name for lane, _, name, _ in trace_of(page, tmp_path / "looked.json") if lane == 0 and " " in name]
        return names == [f"step {turn[STEP]}" if turn[STEP] else NO_STEP for turn in turns_of(worked.url)]

    def rests(page):
        charts = page.get_by_role("article", name="Engine 0").locator(".charts")
        return re.search(r"output 0\s+prompt 0\s", charts.inner_text())

    def lists_requests(page):
        """They come with every second frame, and only once a page has caught up; lanes from before begin with them."""
        rows = page.get_by_role("article", name="Engine 0").locator(".requests tbody tr").all_inner_texts()
        listed = worked.http.get(f"{worked.url}/v1/requests").json()["data"]
        outputs = sorted(int(row.split("\t")[6].replace(",", "")) for row in rows)
        return outputs == sorted(one["num_output_tokens"] for one in listed)

    until(early, lambda: rests(early) and lists_requests(early) and shows_all(early))
    early.get_by_role("button", name="Pause").click()  # now nobody watches: the server forgets what it has shown
    before = trace_of(early, tmp_path / "early.json")
    early.wait_for_timeout(700)
    late = open_page(f"{worked.url}/#live")
    late.get_by_role("article", name="Engine 0").wait_for()
    until(late, lambda: rests(late) and lists_requests(late) and shows_all(late))
    late.get_by_role("button", name="Pause").click()
    now = trace_of(late, tmp_path / "late.json")
    assert serious(late) == []
    lanes = [one for one in now if one[0] > 0]
    assert len(now) - len(lanes) > 1000
    assert now == before
    assert any(ts < 0 for _, ts, *_ in lanes), "the long request began before the first step that is kept"
    assert any(length < 0 for *_, length in lanes), "and goes on"
    for name in (".charts", ".requests"):
        texts = [page.get_by_role("article", name="Engine 0").locator(name).inner_text() for page in (early, late)]
        # How old a request is goes on.
        assert re.sub(r"[\d.]+ m?s\b", "", texts[0]) == re.sub(r"[\d.]+ m?s\b", "", texts[1])


# Two requests with a pause of nine seconds between them: four turns each, of which the last three bring tokens.
GAPS = """async () => {
  const { EngineView } = await import("/web/engine_view.js");
  const view = new EngineView(0);
  const turn = (number, at, id, { arrived, first, ended, brought = 0 }) => [
    number, at, 0.01, 0.08, 0.01, brought, "", "", [], arrived ? [[id, 4]] : [], ended ? [[id, "stop"]] : [],
    number, 1, 1, 0, 0, 0, arrived ? [[id, 0, 4, 0]] : [], [], first ? [id] : [],
  ];
  const life = (number, at, id) => [
    turn(number, at, id, { arrived: true }),
    turn(number + 1, at + 0.1, id, { first: true, brought: 1 }),
    turn(number + 2, at + 0.2, id, { brought: 1 }),
    turn(number + 3, at + 0.3, id, { ended: true, brought: 1 }),
  ];
  const turns = [...life(1, 1, "a"), ...life(5, 10, "b")];
  view.take({ engine: 0, is_whole: true, now: 12, turns, owners: [], kept_since: 1, num_requests: 0, samples: [] });
  const lengths = (list) => list.map(([, length]) => length);
  return { gaps: lengths(view.gaps), ttft: lengths(view.ttft), spans: view.spans.length };
}"""


def test_gaps_leave_out_the_time_in_which_nobody_waited(echo, open_page):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    found = page.evaluate(GAPS)
    assert found["gaps"] == pytest.approx([0.1] * 4)
    assert found["ttft"] == pytest.approx([0.2, 0.2])
    assert found["spans"] == 2


def test_a_step_log_is_played_back_as_fast_as_somebody_likes(echo, open_page, tmp_path, monkeypatch):
    clock = itertools.count(1000.0, 0.05)  # seconds: long enough to hold the play in its middle
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        harness = Harness(log=tmp_path / "log", num_pages=40)
        for _ in range(6):
            harness.add([1, 2, 3] * 3, 12)
        harness.drain()
        harness.engine.close()
    page = open_page(f"{echo.url}/#live")
    page.get_by_label("Open a step log").set_input_files(tmp_path / "log")
    slider = page.get_by_role("slider", name="The moment that is shown")
    end = float(slider.get_attribute("max"))
    assert float(slider.input_value()) == pytest.approx(end)
    region = page.get_by_role("article", name="Engine 0").get_by_role("region", name="Requests")
    slider.fill(str(end / 3))
    region.get_by_role("row").nth(2).wait_for()  # somebody has a row in the middle of it
    slider.fill("0")
    speed = page.get_by_role("combobox", name="Speed")
    speed.select_option("0.1")
    page.get_by_role("button", name="Play", exact=True).click()
    until(page, lambda: float(slider.input_value()) > 0)
    # A page that draws seldom holds at once, too.
    page.evaluate("() => { globalThis.requestAnimationFrame = (work) => setTimeout(work, 90); }")
    page.get_by_role("button", name="Hold").click()
    held = slider.input_value()
    page.wait_for_timeout(300)
    assert slider.input_value() == held
    speed.select_option("64")
    page.get_by_role("button", name="Play", exact=True).click()
    until(page, lambda: float(slider.input_value()) == pytest.approx(end))
    page.get_by_role("button", name="Play", exact=True).wait_for()


def test_a_page_that_is_not_drawn_shows_no_steps_behind_the_word_to_pause(worked, open_page, tmp_path):
    page = open_page(f"{worked.url}/#live")
    until(page, lambda: page.get_by_role("article", name="Engine 0").get_by_role("row").count() > 1)
    hold_clock(page)
    page.get_by_role("button", name="Pause").click()
    before = trace_of(page, tmp_path / "before.json")
    page.wait_for_timeout(700)
    page.clock.run_for(700)
    assert trace_of(page, tmp_path / "after.json") == before


def test_a_cached_prefix_shows_how_it_begins(worked, open_page):
    page = open_page(f"{worked.url}/#live")
    engine = page.get_by_role("article", name="Engine 0")
    engine.get_by_role("img", name="Map of cached prefixes").scroll_into_view_if_needed()
    with page.expect_response(lambda reply: "/prefixes/" in reply.url and reply.ok) as read:
        until(page, lambda: hover(engine.get_by_role("img", name="Map of cached prefixes"), engine))
    beginning = read.value.json()
    assert 0 < len(beginning["tokens"]) <= 100
    said = worked.post("/detokenize", {"tokens": beginning["tokens"]}).json()["prompt"]
    assert beginning["text"] == said
    for path in (f"0/prefixes/{10**8}", "7/prefixes/0", "0/prefixes/x"):
        assert worked.http.get(f"{worked.url}/engines/{path}").status_code == 404, path


def hover(canvas, engine):
    """Point at the map, and say whether the beginning of a prefix is shown."""
    canvas.hover(position={"x": 20, "y": 60})
    return engine.get_by_label("How the prefix begins").count()


def test_the_table_shows_what_requests_have_left(slow_echo, open_page):
    body = {"prompt": "one two three four five", "max_tokens": 100_000, "stream": True}
    with (
        slow_echo.http.stream("POST", f"{slow_echo.url}/v1/completions", json=body | {"timeout": 500}),
        slow_echo.http.stream("POST", f"{slow_echo.url}/v1/completions", json=body),
    ):
        page = open_page(f"{slow_echo.url}/#live")
        use_key(page)
        table = page.get_by_role("article", name="Engine 0").get_by_role("region", name="Requests")
        until(page, lambda: table.get_by_role("row").count() == 3)
        heads = table.get_by_role("columnheader")
        names = heads.all_inner_texts()
        assert "timeout" in heads.nth(names.index("Slack")).get_attribute("title")
        rows = [table.get_by_role("row").nth(place).get_by_role("cell").all_inner_texts() for place in (1, 2)]
        assert sorted(bool(re.fullmatch(r"4\d\d\.\d\d s", row[names.index("Slack")])) for row in rows) == [False, True]
        assert {row[names.index("Slack")] for row in rows} & {"\N{EN DASH}"}
        assert all(0 < int(row[names.index("Left")].replace(",", "")) <= 100_000 for row in rows)
