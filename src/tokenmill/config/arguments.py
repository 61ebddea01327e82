"""Translate a command line before argparse reads it: flags of other engines become ours, unknown ones are refused.

Flags that take several values here get their name before each of them, which is how argparse collects them.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tokenmill.core.errors import InvalidConfig
from tokenmill.core.names import did_you_mean

MODEL_FLAGS = ("--model", "--model-path", "-m", "-hf", "-hfr", "--hf-repo")


class Arguments:
    """One command line on its way to argparse.

    Attributes:
        words: as argparse gets them.
        notes: messages for the user.
    """

    def __init__(
        self, given: Iterable[str], actions: Mapping[str, argparse.Action], repeatable: Collection[str], foreign: bool
    ) -> None:
        """Read a command line; `foreign`: accept flags of other engines.

        Raises:
            InvalidConfig: naming the flag that is unknown or not supported.
        """
        self.words: list[str] = []
        self.notes: list[str] = []
        self._actions = actions
        self._rest = deque(given)
        self._names_model = any(word.split("=")[0] in MODEL_FLAGS for word in self._rest)
        while self._rest:
            self._take(self._rest.popleft(), repeatable, foreign)

    def _take(self, word: str, repeatable: Collection[str], foreign: bool) -> None:
        name, equals, value = word.partition("=")
        if word == "--":
            self.words += [word, *self._rest]
            self._rest.clear()
        elif not _is_flag(word):
            self.words.append(word)
            self._names_model = True
        elif name not in self._actions:
            self._take_unknown(name, [value] if equals else None, foreign)
        else:
            self.words.append(word)
            takes_value = self._actions[name].nargs != 0 and not equals
            if takes_value and self._rest and (self._rest[0] in ("-", "") or not _is_flag(self._rest[0])):
                self.words.append(self._rest.popleft())
            if name in repeatable:
                self._take_further(name)

    def _take_further(self, name: str) -> None:
        values = self._values(first_is_value=False)
        for value in values:
            self.words += [name, value]
        if values and not self._names_model and not (self._rest and not _is_flag(self._rest[0])):
            self.notes.append(f"{name} takes {len(values) + 1} values, and no MODEL is given")

    def _take_unknown(self, name: str, values: list[str] | None, foreign: bool) -> None:
        if foreign:
            from tokenmill.config.foreign_flags import find, foreign_flags

            flag, is_negated = find(name, foreign_flags())
            if flag is not None and flag.here != "same":
                if values is None:
                    few = flag.takes == "=" and self._rest and not _is_flag(self._rest[0])
                    few = few or (flag.takes == "?" and bool(self._rest) and self._rest[0] in flag.neutral)
                    values = [self._rest.popleft()] if few else self._values() if flag.takes == "+" else []
                ours, note = flag.replacement(values, is_negated)
                self.words += ours
                self.notes += [note] if note else []
                return
        long_names = [flag for flag in self._actions if flag.startswith("--")]
        raise InvalidConfig(f"unknown flag {name}{did_you_mean(name, long_names)}")

    def _values(self, first_is_value: bool = True) -> list[str]:
        """Return the words up to the next flag, except a last one that can only be the model."""
        values: list[str] = []
        while self._rest and not _is_flag(self._rest[0]):
            values.append(self._rest.popleft())
        if len(values) > first_is_value and not self._names_model and ("/" in values[-1] or Path(values[-1]).is_dir()):
            self._rest.appendleft(values.pop())
        return values


def _is_flag(word: str) -> bool:
    # A lone dash is stdin, and a dash with a digit a number.
    return (word.startswith("-") and word.lstrip("-")[:1].isalpha()) or word == "--"
