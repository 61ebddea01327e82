"""Separate the thinking in a model's text from its answer, however the text was cut into pieces."""

from __future__ import annotations

import msgspec

from tokenmill.serving.frontend.tool_parsers.scanners import MAX_GAP, MarkerFinder


class ReasoningStyle(msgspec.Struct, frozen=True):
    """The marks that a family of models puts around its thinking.

    Attributes:
        always_thinks: the text begins with thinking even if neither the prompt nor the answer has the mark.
        opening: the text before an answer that is not a call.
        needs_special_tokens: the marks are special tokens, which must stay in the text.
    """

    begin: str
    end: str
    always_thinks: bool = False
    opening: str = ""
    needs_special_tokens: bool = False

    def has_begun(self, prompt_end: str, is_off: bool = False) -> bool | None:
        """Return True if thinking has begun before the answer; None: it is over, or there will be none.

        Args:
            prompt_end: the end of the prompt, which counts most.
            is_off: the template was told that the model must not think.
        """
        prompt_end = prompt_end.rstrip()
        if prompt_end.endswith(self.begin):
            return True
        # Where answers have an opening of their own, the end of any message may look like that of thinking.
        if not self.opening and (is_off or prompt_end.endswith(self.end)):
            return None
        return self.always_thinks

    def is_open_in(self, text: str) -> bool:
        """Return True if a text that is to be continued stops within thinking."""
        return text.rfind(self.begin) > text.rfind(self.end)


class ReasoningSplitter:
    """Splits one answer into thinking and text. White space around the marks belongs to neither.

    Attributes:
        has_thought: the text has thinking, or had it.
    """

    def __init__(self, style: ReasoningStyle, has_begun: bool) -> None:
        """`has_begun`: the prompt has begun the thinking, though the answer may repeat the mark."""
        self._style = style
        self._has_begun = has_begun
        self._state = "beginning"
        self.has_thought = False
        self._end = MarkerFinder(style.end)
        self._held = ""
        self._space: list[str] = []
        self._drops_space = False

    @property
    def is_thinking(self) -> bool:
        """True while the text so far ends within the thinking."""
        return self._state == "thinking"

    @property
    def is_answering(self) -> bool:
        """True once the thinking is over, or if there is none."""
        return self._state == "answer"

    @property
    def is_done(self) -> bool:
        """True once all further text is answer, unchanged."""
        return self._state == "answer" and not self._drops_space

    def feed(self, text: str) -> tuple[str, str]:
        """Add a delta; return the thinking and the answer that may be shown now."""
        reasoning = ""
        if self._state == "beginning":
            text = self._begin(text)
        if self._state == "thinking" and text:
            before, marker, text = self._end.push(text)
            reasoning = self._trim(before)
            if marker:
                self._state, self._drops_space = "answer", True
        if self._state != "answer":
            return reasoning, ""
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """Return the thinking and the answer that were held back: an incomplete mark is text after all."""
        if self._state == "thinking":
            return self._trim(self._end.finish()), ""
        held, self._held = self._held, ""
        return (held.strip(), "") if self._has_begun else ("", held)

    def _begin(self, text: str) -> str:
        """Find the mark at the beginning, or its absence; return the text after it."""
        text = self._held + text
        rest = text.lstrip()
        self._held = ""
        is_near = len(text) - len(rest) <= MAX_GAP
        if is_near and rest.startswith(self._style.begin):
            self._state, self._drops_space, self.has_thought = "thinking", True, True
            return rest[len(self._style.begin) :]
        if is_near and self._style.begin.startswith(rest):
            self._held = text
            return ""
        self._state, self._drops_space = ("thinking", True) if self._has_begun else ("answer", False)
        self.has_thought = self._has_begun
        return text

    def _trim(self, text: str) -> str:
        """Strip white space at both ends of the thinking; hold back what may be its end."""
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        shown = "".join(self._space) + body
        self._space = [text[len(body) :]]
        return shown
