"""The pictures of the documents: what the step log says is what is drawn, and they are what the script draws today."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.drawing.acceptance import draw_acceptance
from tools.drawing.page_pool import EVICTABLE, OF_A, OF_B, SHARED, draw_page_pool
from tools.drawing.request import STOPS, draw_request
from tools.drawing.timeline import Timeline, draw_timeline, read_timeline

from tests.house.source_tree import ROOT
from tools import draw

PICTURES = ROOT / "docs" / "pictures"
NUM_TOKENS = sum(max_tokens for _, max_tokens, _ in draw.ARRIVALS)


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    log = Path(tmp_path_factory.mktemp("log"), "steps.log")
    draw.record(log)
    return read_timeline(log)


def test_a_timeline_has_every_token_of_the_log_once(timeline):
    assert len(timeline.lanes) == len(draw.ARRIVALS)
    for lane in timeline.lanes.values():
        assert lane.cached + sum(of_prompt for _, of_prompt, _ in lane.cells) == lane.num_prompt_tokens
    # The first token of an answer comes of the last of the prompt.
    assert sum(decoded for lane in timeline.lanes.values() for _, _, decoded in lane.cells) == NUM_TOKENS - 6
    for step in range(1, timeline.num_steps + 1):
        cells = [cell for lane in timeline.lanes.values() for cell in lane.cells if cell[0] == step]
        assert 0 < sum(of_prompt + decoded for _, of_prompt, decoded in cells) <= timeline.budget


def test_the_timeline_of_the_documents_shows_what_its_text_says(timeline):
    """Mixed steps, a prompt in chunks, a request that waits, a prefix that was cached."""
    lanes = list(timeline.lanes.values())
    prompts = {step for lane in lanes for step, of_prompt, _ in lane.cells if of_prompt}
    decodes = {step for lane in lanes for step, _, decoded in lane.cells if decoded}
    assert len(prompts & decodes) > 3
    assert any(sum(of_prompt > 0 for _, of_prompt, _ in lane.cells) > 2 for lane in lanes)
    assert any(lane.cells[0][0] > lane.arrived for lane in lanes)
    assert any(lane.cached for lane in lanes)


def test_the_pictures_are_drawn_by_this_tree(timeline):
    drawn = {"timeline": draw_timeline(timeline), "page-pool": draw_page_pool(), "request": draw_request()}
    assert {path.stem for path in PICTURES.glob("*.svg")} == drawn.keys()
    for name, text in drawn.items():
        ElementTree.fromstring(text)
        assert (PICTURES / f"{name}.svg").read_text() == text, f"python tools/draw.py all docs/pictures ({name})"


def test_the_pool_has_each_page_once():
    pages = [*SHARED, *OF_A, *OF_B, *EVICTABLE, 0]
    assert len(pages) == len(set(pages))


def test_no_two_stops_of_a_request_cover_each_other():
    corners = [(stop.x, stop.y) for stop in STOPS]
    assert len(corners) == len(set(corners))


def test_speed_is_drawn_against_what_was_accepted(tmp_path: Path) -> None:
    def row(accepted: float, ratio: float, streams: int = 1) -> dict[str, object]:
        return {"streams": streams, "method": "suffix", "accepted": accepted, "ratio": [1.0, ratio, 9.0]}

    for name, form in (("a", "none"), ("b", "int8")):
        document = {"quantization": form, "rows": [row(0.9, 3.5), row(0.2, 1.25), row(0.5, 7.0, streams=8)]}
        (tmp_path / name).write_text(f"some words\n{json.dumps(document)}\n", encoding="utf-8")
    picture = draw_acceptance([tmp_path / "a", tmp_path / "b"])
    ElementTree.fromstring(picture)
    assert picture.count("90% right: 3.50x") == picture.count("20% right: 1.25x") == 2
    assert "7.00x" not in picture, "one stream only"
    assert all(name in picture for name in ("bfloat16", "int8", ">4x<"))
