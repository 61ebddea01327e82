"""Build the grammar of an answer whose text is free until a call opens, and again after the call (a lazy grammar).

    noise   any text, special tokens among it: what a model would write without a grammar
    until   noise up to the first of some marks, as a token of the vocabulary or spelled; then its caller's rule begins

A spelled mark is a lexeme that ends as soon as it matches, so no reading of the text as noise outlives it. Notations
write `lazy` with these rules. Does not know notations, and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, Thinking, literal

SPACE = r"/[ \t\r\n]{0,256}/"
# Between the marks of a call and what is in it; models differ.
GAP = r"/[ \r\n]{0,2}/"


class FreeText:
    """Collects the rules of one answer; each method returns a rule or the name of one."""

    def __init__(self, builder: GrammarBuilder) -> None:
        """Begin an answer; `marks` are those without which its free text stays free, None where that cannot be said."""
        self.builder = builder
        self._rules = ["TEXT: /(?s:.*)/"]
        self.marks: list[str] | None = []
        self._noises: dict[tuple[int, ...], str] = {}

    def noise(self, marks: Sequence[str] = ()) -> str:
        """Return the rule of any text with special tokens, except the tokens of these marks."""
        return f"{self.before(marks)} TEXT"

    def until(self, marks: Sequence[str]) -> str:
        """Return the rule of any text up to and including the first of these marks."""
        self.listen_for(*marks)
        ids = self.ids(marks)
        spelled = self.lazily(f"TEXT ({' | '.join(map(literal, marks))})")
        with_token = f"{self.noise(marks)} <[{','.join(map(str, ids))}]> | " if ids else ""
        return self.rule(f"{with_token}{self.before(marks)} {spelled}")

    def listen_for(self, *marks: str) -> None:
        """Note marks without which free text stays free."""
        if self.marks is not None:
            self.marks += [mark for mark in marks if mark not in self.marks]

    def with_calls(self, marks: Sequence[str], call: str) -> str:
        """Return the rule of any text with calls in it, each begun by one of these marks."""
        return f"({self.until(marks)} ({call}))* {self.noise(marks)}"

    def closing(self, mark: str) -> str:
        """Return the rule of a mark that ends a call, as its token or spelled."""
        token_id = self.builder.vocabulary.token_id(mark)
        return literal(mark) if token_id is None else f"(<[{token_id}]> | {literal(mark)})"

    def specials(self, marks: Sequence[str] = ()) -> str:
        """Return the rule of one token that is no text of its own, except those of these marks; "" without any."""
        ranges = _ranges(self.builder.vocabulary.ids_outside_text(), frozenset(self.ids(marks)))
        return f"<[{ranges}]>" if ranges else ""

    def rule(self, text: str) -> str:
        """Add a rule; return its name."""
        return self._add("rule", text)

    def lazily(self, text: str) -> str:
        """Add a lexeme that ends as soon as it matches; return its name."""
        return self._add("mark", text, "[lazy]")

    def lexeme(self, text: str) -> str:
        """Add a lexeme that goes on as long as it matches; return its name."""
        return self._add("LEXEME", text)

    def grammar(self, answer: str, thinking: Thinking | None) -> str:
        """Return the rule of the whole: the answer, after thinking where the model thinks, which may not end."""
        if thinking is not None:
            rest = self.rule(answer)
            thought = self.rule(f"{self.until((thinking.end,))} {rest} | {self.noise((thinking.end,))}")
            answer = thought if thinking.has_begun else f"{rest} | {self._begun(thinking.begin)} {thought}"
        return self.builder.lark("\n".join([f"start: {answer}", *self._rules]))

    def _begun(self, mark: str) -> str:
        """Return the rule of a mark at the beginning, whose texts win against noise."""
        self.listen_for(mark)
        pieces = self.builder.pieces(mark)
        if len(pieces) == 1 and not pieces[0].startswith("<["):
            return self.lazily(f"{SPACE} {pieces[0]}")
        return " ".join([SPACE, *(one if one.startswith("<[") else self.lazily(one) for one in pieces)])

    def before(self, marks: Sequence[str]) -> str:
        """Return the rule of any text up to a special token, except these marks; text of its own may follow."""
        key = tuple(self.ids(marks))
        if key not in self._noises:
            self._noises[key] = self.rule(f"(TEXT {special})*" if (special := self.specials(marks)) else '""')
        return self._noises[key]

    def ids(self, marks: Sequence[str]) -> list[int]:
        """Return the ids of those of these marks that are tokens."""
        ids = (self.builder.vocabulary.token_id(mark) for mark in marks)
        return sorted(token_id for token_id in ids if token_id is not None)

    def _add(self, kind: str, text: str, attributes: str = "") -> str:
        name = f"{kind}{'_' if kind.isupper() else ''}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {text}")
        return name


def _ranges(ids: Iterable[int], excluded: frozenset[int]) -> str:
    """Return ascending ids as ranges, `1-3,7`."""
    ranges: list[list[int]] = []
    for token_id in ids:
        if token_id in excluded:
            continue
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
