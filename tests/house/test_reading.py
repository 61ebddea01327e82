"""The walks of docs/reading.md: each anchor stands where it says, no walk is long, and requests come by every stop."""

import re
import sys
import threading
from types import FrameType
from typing import Any

import pytest
from tools.anchors import GoneError

from tests.house.documents import documents
from tools import anchors

WALKS = anchors.walks(anchors.WALKS.read_text(encoding="utf-8"))
# Other processes take the last walk.
IN_ONE_PROCESS = list(WALKS)[:4]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_anchors_stand_where_they_say(path):
    text = path.read_text(encoding="utf-8")
    assert anchors.rewritten(text) == text, "run python tools/anchors.py"


def test_there_are_five_walks_of_at_most_900_lines():
    assert list(WALKS) == [
        "A request in one process",
        "A step",
        "A page's life",
        "A token's draw",
        "A stream over HTTP",
    ]
    for title, stops in WALKS.items():
        assert 0 < anchors.num_lines(stops) <= anchors.MOST_LINES, title


def test_a_moved_symbol_gets_its_new_line():
    text = "see `engine/loop/engine.py:1`\n`Engine.step`, and `engine/loop/engine.py:7`."
    new = anchors.rewritten(text)
    line = anchors.anchors(new)[0].line
    assert new == text.replace("engine.py:1`", f"engine.py:{line}`")
    source = (anchors.SOURCE / "engine/loop/engine.py").read_text(encoding="utf-8").splitlines()
    assert source[line - 1].startswith("    def step(")


@pytest.mark.parametrize("text", ["`engine/loop/engine.py:1` `Engine.stop`", "`engine/engine.py:1` `Engine.step`"])
def test_a_symbol_that_is_gone_is_refused(text):
    with pytest.raises(GoneError, match=r"Engine\.st"):
        anchors.rewritten(text)


def test_lines_that_two_stops_show_count_once():
    whole, part = anchors.anchors("`core/plan.py:1` `StepOutcome` `core/plan.py:1` `StepOutcome.wait`")
    assert anchors.num_lines([whole, part]) == anchors.num_lines([whole]) > anchors.num_lines([part]) > 1


@pytest.mark.slow
def test_requests_come_by_every_stop():
    stops = numbered_stops()
    passed = functions_called(run_requests)
    missed = {title: [one.symbol for one in own if key(one) not in passed] for title, own in stops.items()}
    assert not any(missed.values()), missed


def numbered_stops() -> dict[str, list[anchors.Anchor]]:
    """Return the functions among the numbered stops of the walks that one process can take."""
    text = re.sub(r"^Beside the way.*?\n\n", "", anchors.WALKS.read_text(encoding="utf-8") + "\n\n", flags=re.M | re.S)
    own = {title: stops for title, stops in anchors.walks(text).items() if title in IN_ONE_PROCESS}
    return {title: [stop for stop in stops if not stop.is_class] for title, stops in own.items()}


def key(stop: anchors.Anchor) -> tuple[str, str]:
    return str(anchors.SOURCE / stop.path), stop.symbol


def functions_called(work: Any) -> set[tuple[str, str]]:
    """Return file and qualified name of each function that `work` calls, on this thread and those that it starts."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def run_requests() -> None:
    """Run requests that share prefixes, are greedy or drawn, look for a stop, and need pages of one another."""
    from tokenmill import LLM, SamplingParams

    plain = {"kernels": "torch", "attention_backend": "reference", "dtype": "float32"}
    with LLM(num_pages=24, max_model_len=256, max_num_seqs=4, **plain) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        drawn = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, presence_penalty=0.1, max_tokens=24, stop=["@@"])
        shared = "A page is the unit of allocation, of sharing and of eviction. "
        llm.generate([shared * 2, shared * 2], greedy, use_tqdm=False)
        llm.generate([shared + "A row is another thing, which a request owns.", "Other words"], drawn, use_tqdm=False)
        llm.generate([f"{number} is a number, and a prompt of its own" for number in range(6)], greedy, use_tqdm=False)
