"""Break a text that comes in pieces between words, so that no word is cut at the edge of the terminal."""

from __future__ import annotations

from rich.cells import cell_len


class WordWrap:
    """Holds back a word that is not complete yet; a word wider than a line is left to the terminal."""

    def __init__(self, width: int) -> None:
        """Wrap to `width` cells: some characters take two."""
        self._width = width
        self._column = 0
        self._spaces = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """Return the text that can be written now."""
        return "".join(map(self._take, text))

    def flush(self) -> str:
        """Return the rest, at the end of a text; the next one begins a line."""
        rest = self._end_word()
        self._column, self._spaces = 0, ""
        return rest

    def _take(self, char: str) -> str:
        if char == "\n":
            return self._end_word() + self._break()
        if char.isspace():
            written = self._end_word()
            self._spaces += char
            return written
        # Where characters take two cells, lines are broken between any of them.
        written = self._end_word() if cell_len(char) == 2 else ""
        self._word += char
        return written

    def _end_word(self) -> str:
        if not self._word:
            return ""
        word, spaces, self._word, self._spaces = self._word, self._spaces, "", ""
        if self._column and self._column + cell_len(spaces + word) > self._width:
            self._column = cell_len(word)
            return f"\n{word}"
        self._column += cell_len(spaces + word)
        return spaces + word

    def _break(self) -> str:
        self._column, self._spaces = 0, ""
        return "\n"
