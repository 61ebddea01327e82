"""Write the prompt of a gap to fill: the marks that a vocabulary has for it, and the texts between them.

The form is llama.cpp's: [repository and files] prefix mark, prefix, suffix mark, suffix, middle mark, start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.infill import SPELLINGS, Infill, Mark
from tokenmill.serving.frontend.tokenizer import Tokenizer

_NEEDED = (Mark.PREFIX, Mark.SUFFIX, Mark.MIDDLE)
# Models were trained on the names of repositories and files; where there is none to give, these say nothing.
_REPOSITORY = "repository"
_CURRENT = "current"

Encode = Callable[[str], list[int]]


class InfillPrompt:
    """The marks of one vocabulary.

    Attributes:
        ids: of the marks that it has; a text never has one of them, so each also ends a filling.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Find the marks: those that the checkpoint names (`fim_prefix_token` ...), then those spelt as usual."""
        self.ids: Mapping[Mark, int] = {
            mark: token_id
            for mark in Mark
            if (token_id := _find(tokenizer, mark)) is not None and token_id < vocab_size
        }

    def encode(self, infill: Infill, encode: Encode) -> list[int]:
        """Return the tokens of the prompt, without those that the tokenizer puts around every text.

        Args:
            encode: encodes one text, without special tokens around it.

        Raises:
            InvalidRequest: the vocabulary has no marks for it.
        """
        if missing := [mark.value for mark in _NEEDED if mark not in self.ids]:
            raise InvalidRequest(
                "this model was not made to fill gaps: its vocabulary has no token that marks the "
                f"{' or the '.join(missing)}; send a prompt without a suffix",
                "suffix",
            )
        prefix, suffix, middle = (self.ids[mark] for mark in _NEEDED)
        return [
            *self._context(infill, encode),
            prefix,
            *encode(infill.prefix),
            suffix,
            *encode(infill.suffix),
            middle,
            *encode(infill.start),
        ]

    def _context(self, infill: Infill, encode: Encode) -> Iterator[int]:
        """Yield the other files; without marks for them, they are texts one behind the other."""
        if not infill.files:
            return
        repository, separator = self.ids.get(Mark.REPOSITORY), self.ids.get(Mark.FILE)
        if repository is None or separator is None:
            for file in infill.files:
                yield from encode(file.text)
            return
        yield repository
        yield from encode(f"{_REPOSITORY}\n")
        for file in infill.files:
            yield separator
            yield from encode(f"{file.filename}\n{file.text}")
        yield separator
        yield from encode(f"{_CURRENT}\n")


def _find(tokenizer: Tokenizer, mark: Mark) -> int | None:
    named = tokenizer.special_tokens.get(f"fim_{mark.value}_token")
    spellings = (*([] if named is None else [named]), *SPELLINGS[mark])
    return next((found for one in spellings if (found := tokenizer.token_id(one)) is not None), None)
