"""The measured part of the card: which free reply counts as good, and what is written between the marks."""

from __future__ import annotations

import pytest


def free(wanted, tools=()):
    """A free request with what its reply must hold."""
    from free_phrasings import Free

    return Free(("first", "last | turn"), wanted, tools)


@pytest.mark.parametrize(
    ("wanted", "reply", "good"),
    [
        ("Ada", "Your name is Ada.", True),
        ("Ada", "Your name is Ida.", False),
        (("fox", "lantern"), "A FOX had a lantern.", True),
        (("fox", "lantern"), "A fox had a lamp.", False),
        ({"age": 31}, ' {"age": 31}\n', True),
        ({"age": 31}, '{"age": "31"}', False),
        ({"age": 31}, '{"age": 31', False),
        ({"name": "f", "arguments": {"x": 1}}, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', True),
        (
            {"name": "f", "arguments": {"x": 1}},
            '<tool_call>\n{"name": "g", "arguments": {"x": 1}}\n</tool_call>',
            False,
        ),
    ],
)
def test_a_free_reply_is_good_if_it_holds_what_is_wanted_and_ends(wanted, reply, good):
    from free_phrasings import is_good

    assert is_good(free(wanted), reply, ended=True) == good
    assert not is_good(free(wanted), reply, ended=False)


def test_free_requests_are_distinct_and_enough():
    from free_phrasings import FREE

    assert len({free.turns for free in FREE}) == len(FREE) >= 40


def test_the_card_is_rewritten_between_its_marks_only(tmp_path):
    from card import BEGIN, END, write_card

    card = tmp_path / "README.md"
    card.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    replies = [(free("x"), "a <b> reply that | is " + "long " * 30, True), (free("y"), "no", False)]
    write_card(card, {"copying": (3, 4)}, [("Tell me.", "Once.")], replies)
    text = card.read_text()
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text and "| copying | 3 | 4 | 75.0% |" in text and "- *Tell me.* Once." in text
    assert "Of 2 requests as a new user may type them, 1 got a good reply" in text
    rows = [line for line in text.splitlines() if line.startswith("| first")]
    assert len(rows) == 2 and "last \\| turn" in rows[0] and rows[0].endswith("| yes |") and "…" in rows[0]
