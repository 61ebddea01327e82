"""`NgramDrafter`: prompt lookup. What followed the same few tokens earlier in a request, may follow again."""

from __future__ import annotations

import numpy as np

from tokenmill.core.request import Request
from tokenmill.engine.speculation.drafts import NO_DRAFT, Draft
from tokenmill.engine.speculation.request_text import RequestText


class NgramDrafter:
    """Copies what followed the earliest occurrence of the longest n-gram at the end of the text, as vLLM does.

    Measured on copy-and-edit text (benchmarks/drafters.py, 16 draft tokens), the earliest brings 5.4 tokens a step and
    the newest 5.0: what is copied stands before its copy. On JSON it is 2.48 and 2.44, on source code 1.81 and 1.89. By
    the same measure the bounds are 2 and 5; 5 and 5, vLLM's own, bring 3.6, 1.9 and 1.4. The estimate is equal tokens /
    (equal tokens + 1), and on short n-grams too high.
    """

    def __init__(self, prompt_lookup_min: int = 2, prompt_lookup_max: int = 5) -> None:
        self._lengths = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._texts: dict[str, RequestText] = {}

    def propose(self, request: Request, limit: int) -> Draft:
        """Return at most `limit` tokens that followed the longest n-gram at the end of the text."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = RequestText(self._lengths, to_first=True)
        if not text.take_in(request.token_ids):
            return NO_DRAFT
        length, places = text.longest_context(1)
        if not places:
            return NO_DRAFT
        equal = np.arange(length, length + limit, dtype=np.float32)
        return Draft(np.array(text.copy_from(places[0], limit), dtype=np.int32), equal / (equal + 1))

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._texts.pop(request.id, None)
