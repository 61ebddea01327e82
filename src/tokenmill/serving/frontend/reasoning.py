"""Thinking in a model's text, told apart from its answer; how the text was cut into pieces makes no difference."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.serving.frontend.tool_parsers.scanners import MAX_GAP, MarkerFinder


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """How a family of models marks its thinking.

    Attributes:
        always_thinks: the text begins with thinking even where neither prompt nor answer says so.
        opening: what stands before an answer that is no call.
        needs_special_tokens: the marks are special tokens, which must not be left out of the text.
    """

    begin: str
    end: str
    always_thinks: bool = False
    opening: str = ""
    needs_special_tokens: bool = False

    def has_begun(self, prompt_end: str, is_off: bool = False) -> bool | None:
        """Whether thinking has begun before the answer; None: it is over, or there is to be none.

        Args:
            prompt_end: what the prompt ends with counts most.
            is_off: the template was told that the model is not to think.
        """
        prompt_end = prompt_end.rstrip()
        if prompt_end.endswith(self.begin):
            return True
        # Where answers have an opening of their own, the end of any message may look like that of thinking.
        if not self.opening and (is_off or prompt_end.endswith(self.end)):
            return None
        return self.always_thinks

    def is_open_in(self, text: str) -> bool:
        """Whether a text that is to be continued stops within thinking."""
        return text.rfind(self.begin) > text.rfind(self.end)


class ReasoningSplitter:
    """For one answer. White space around the marks belongs to neither part.

    Attributes:
        has_thought: there is thinking, or there was.
    """

    def __init__(self, style: ReasoningStyle, has_begun: bool) -> None:
        """`has_begun`: the prompt has begun the thinking. The mark may be repeated all the same."""
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
        """The text so far ends within the thinking."""
        return self._state == "thinking"

    @property
    def is_answering(self) -> bool:
        """The thinking is over, or there is none."""
        return self._state == "answer"

    @property
    def is_done(self) -> bool:
        """All further text is answer, as it comes."""
        return self._state == "answer" and not self._drops_space

    def feed(self, text: str) -> tuple[str, str]:
        """Take in a delta; returns thinking and answer that may be shown now."""
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
        """What was held back: a mark that did not come is text after all."""
        if self._state == "thinking":
            return self._trim(self._end.finish()), ""
        held, self._held = self._held, ""
        return (held.strip(), "") if self._has_begun else ("", held)

    def _begin(self, text: str) -> str:
        """Find the mark at the beginning, or that there is none; returns the text after it."""
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
        """Thinking without the white space at its two ends: what may be the end is held back."""
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
