"""Lines are broken between words, however the text comes."""

from __future__ import annotations

import numpy as np
from rich.cells import cell_len

from tokenmill.cli.word_wrap import WordWrap


def wrapped(text: str, width: int, pieces: list[int]) -> str:
    wrap, written, start = WordWrap(width), "", 0
    for length in [*pieces, len(text)]:
        written += wrap.feed(text[start : start + length])
        start += length
    return written + wrap.flush()


def test_no_word_is_cut_and_none_is_lost(rng: np.random.Generator) -> None:
    for _ in range(200):
        width = int(rng.integers(8, 60))
        words = [
            "".join(rng.choice(list("aéo水.,-"), int(rng.integers(1, 9)))) for _ in range(int(rng.integers(1, 40)))
        ]
        words = [word for word in words if cell_len(word) <= width]
        text = "".join(word + str(rng.choice([" ", " ", " ", "\n", "  ", "\n\n"])) for word in words)
        lines = wrapped(text, width, rng.integers(0, 9, 60).tolist()).split("\n")
        assert all(cell_len(line) <= width for line in lines), (text, width)
        whole = wrapped(text, width, []).split("\n")
        assert whole == lines, "the pieces that a text comes in make no difference"
        narrow = [word for word in words if "水" not in word]
        assert [word for line in lines for word in line.split() if word in narrow] != [] or not narrow
        assert "".join("".join(lines).split()) == "".join(text.split())


def test_indented_lines_stay_indented_and_long_words_whole() -> None:
    assert wrapped("def f():\n    return 1\n", 20, [3, 5]) == "def f():\n    return 1\n"
    assert wrapped("a " + "x" * 30 + " b", 10, [1]) == "a\n" + "x" * 30 + "\nb"
    assert wrapped("水" * 7, 6, [2, 2]) == "水水水\n水水水\n水"


def test_a_word_is_shown_when_it_is_whole() -> None:
    wrap = WordWrap(20)
    assert [wrap.feed(piece) for piece in ("one tw", "o", " ", "three")] == ["one", "", " two", ""]
    assert wrap.flush() == " three"
