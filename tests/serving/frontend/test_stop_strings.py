import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import scaled
from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.frontend.stop_strings import MAX_STOP_LENGTH, StopStrings

few_letters = st.text(alphabet="ab\n", min_size=1, max_size=6)


def run(stops, chunks, include=False):
    matcher = StopStrings(stops, include)
    shown = ""
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.finish(), None


def first_to_complete(stops, text):
    """The definition, character by character."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@settings(max_examples=scaled(200), deadline=None)
@given(
    stops=st.lists(few_letters, max_size=4),
    chunks=st.lists(st.text(alphabet="ab\n", max_size=5), max_size=12),
    include=st.booleans(),
)
def test_the_first_complete_stop_string_ends_the_text_however_it_is_cut(stops, chunks, include):
    text = "".join(chunks)
    expected = first_to_complete(stops, text)
    if expected is None:
        assert run(stops, chunks, include) == (text, None)
    else:
        end, stop = expected
        assert run(stops, chunks, include) == (text[: end if include else end - len(stop)], stop)


def test_text_that_may_become_a_stop_string_is_held_back():
    matcher = StopStrings(["END"])
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("T") == ("ENT", None)
    assert matcher.push(" EN") == (" ", None)
    assert matcher.finish() == "EN"


def test_an_overlong_stop_string_is_refused():
    with pytest.raises(InvalidRequest, match="1025 characters"):
        StopStrings(["a" * (MAX_STOP_LENGTH + 1)])
