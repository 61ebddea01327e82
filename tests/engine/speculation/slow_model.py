"""Find the drafters' proposals by plain search: slow and obvious."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.request import Request

Tokens = list[int]


def places_behind(text: Tokens, context: Tokens) -> list[int]:
    """Return the places where this context ends and something follows, the newest first."""
    length = len(context)
    return [place for place in range(len(text) - 1, length - 1, -1) if text[place - length : place] == context]


def copy_on(text: Tokens, place: int, count: int) -> Tokens:
    """Copy what followed; a copy that reaches the end of the text goes on with its own output."""
    grown = list(text)
    for number in range(count):
        grown.append(grown[place + number])
    return grown[len(text) :]


def ngram_draft(text: Tokens, lengths: range, limit: int) -> Tokens:
    """Return what followed the earliest occurrence of the longest n-gram."""
    for length in reversed(lengths):
        if length <= len(text) and (places := places_behind(text, text[-length:])):
            return copy_on(text, places[-1], limit)
    return []


def equal_tokens(text: Tokens, place: int, end: Tokens) -> int:
    """Count the tokens before a place that equal those at the end."""
    count = 0
    while count < min(len(end), place) and text[place - 1 - count] == end[-1 - count]:
        count += 1
    return count


@dataclass(frozen=True)
class SlowSuffix:
    """The rule of `SuffixDrafter` as its module states it."""

    depth: int
    factor: float
    offset: float
    min_probability: float

    def draft(self, text: Tokens, outputs: list[Tokens], limit: int) -> list[tuple[int, float]]:
        """Tokens and probabilities; `outputs` in the order in which they were finished."""
        end = text[-self.depth :]
        equal, places = self._deepest([(text, p) for p in self._found([text], end, (6, 2, 1), 0)[0]], end)
        copies = [copy_on(text, place, self._count(equal, limit)) for _, place in places]
        if equal < 12:
            newest = outputs[::-1]
            found = self._found(newest, end, (6, 3), equal + 1)
            theirs, places = self._deepest(
                [(text, place) for text, some in zip(newest, found, strict=True) for place in some], end
            )
            if places:
                equal = theirs
                copies = [text[place : place + self._count(equal, limit)] for text, place in places]
        return self._vote(copies, equal) if copies else []

    def _count(self, equal: int, limit: int) -> int:
        return min(limit, int(self.factor * equal + self.offset + 1e-6))

    def _found(self, texts: list[Tokens], end: Tokens, lengths: tuple[int, ...], at_least: int) -> list[list[int]]:
        """Of each text the places behind the longest context that stands in any, 8 in all."""
        for length in lengths:
            needed = max(length, at_least)
            found = [places_behind(text, end[-needed:]) for text in texts]
            if needed <= len(end) and any(found):
                left = 8
                for places in found:
                    del places[left:]
                    left -= len(places)
                return found
            if length <= at_least:
                break
        return [[] for _ in texts]

    def _deepest(self, places: list[tuple[Tokens, int]], end: Tokens) -> tuple[int, list[tuple[Tokens, int]]]:
        depths = [equal_tokens(text, place, end) for text, place in places]
        most = max(depths, default=0)
        return most, [one for one, depth in zip(places, depths, strict=True) if depth == most]

    def _vote(self, copies: list[Tokens], equal: int) -> list[tuple[int, float]]:
        draft: list[tuple[int, float]] = []
        survival = 1.0
        while True:
            number = len(draft)
            votes = [copy[number] for copy in copies if number < len(copy)]
            if not votes:
                return draft
            winner = next(token for token in votes if votes.count(token) == max(map(votes.count, votes)))
            probability = votes.count(winner) / (len(copies) + 1 / (equal + number))
            survival *= probability
            if survival < self.min_probability:
                return draft
            draft.append((winner, probability))
            copies = [copy for copy in copies if number < len(copy) and copy[number] == winner]


def text_of(request: Request) -> Tokens:
    """Its tokens as a list."""
    return request.token_ids.tolist()
