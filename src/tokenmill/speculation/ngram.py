"""`NgramDrafter`: prompt lookup. What followed when the request last said the same few tokens, it may say again."""

from __future__ import annotations

import numpy as np

from tokenmill.core.request import Request
from tokenmill.speculation.drafts import NO_DRAFT, Draft
from tokenmill.speculation.request_text import RequestText


class NgramDrafter:
    """PLACEHOLDER"""

    def __init__(self, prompt_lookup_min: int = 2, prompt_lookup_max: int = 5) -> None:
        self._lengths = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._texts: dict[str, RequestText] = {}

    def propose(self, request: Request, limit: int) -> Draft:
        """See `TextDrafter`."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = RequestText(self._lengths)
        if not text.take_in(request.token_ids):
            return NO_DRAFT
        length, places = text.longest_context(1)
        if not places:
            return NO_DRAFT
        equal = np.arange(length, length + limit, dtype=np.float32)
        return Draft(np.array(text.copy_from(places[0], limit), dtype=np.int32), equal / (equal + 1))

    def forget(self, request: Request) -> None:
        """See `TextDrafter`."""
        self._texts.pop(request.id, None)
