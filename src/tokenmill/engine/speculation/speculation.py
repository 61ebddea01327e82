"""`Speculation`: the scheduler's drafter. Collects drafts for each request, and runs those that are worth their cost.

forced by its grammar ─┐
of a draft model ──────┼─> chances that they are right ─> length control ─> draft tokens of the step
of the text so far ────┘              ^
                                      └── how many were, at each commit
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenmill.config.speculation import SpeculationSettings, SpeculativeConfig
from tokenmill.core.request import Request, TokenArray
from tokenmill.engine.speculation.drafts import NO_DRAFT, Draft, TextDrafter
from tokenmill.engine.speculation.length_control import Acceptance, LengthControl, StepCosts
from tokenmill.engine.speculation.request_text import RequestText
from tokenmill.engine.speculation.suffix import SuffixDrafter

# What a grammar forces is right but for other ways to cut the same text into tokens.
_BELIEF_IN_FORCED = 0.95
# Draft tokens that a request which waits for its next token must be expected to get for that.
_LEAST_FOR_HOLDING = 0.5


class Speculation:
    """Decides by requests, outcomes and settings alone, so that a recorded schedule can be replayed. See `Drafter`.

    Attributes:
        settings: settings whose method is resolved: not `auto`.
    """

    def __init__(self, settings: SpeculationSettings) -> None:
        self.settings = settings
        self._most = settings.config.most_tokens
        self._text = text_drafter(settings.config)
        self._control = LengthControl(StepCosts(settings.step_costs))
        self._acceptance: dict[str, Acceptance] = {}
        self._acceptance_of_forced: dict[str, Acceptance] = {}
        # The estimates of drafts that are run and not committed, and who is to hear what came of them.
        self._launched: dict[str, tuple[Acceptance, Sequence[float]]] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[TokenArray]:
        """Return the draft tokens of each request that are worth their cost."""
        count = len(requests)
        if not self._control.pays_at_best(count, num_tokens, count * self._most):
            return [NO_DRAFT.token_ids] * count
        drafts = [self._draft(request, min(limit, self._most)) for request, limit in zip(requests, limits, strict=True)]
        survivals = [self._survival(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        lengths = self._control.choose(survivals, count, num_tokens, count * self._most)
        for request, draft, length in zip(requests, drafts, lengths, strict=True):
            if length:
                self._launched[request.id] = self._acceptance_of(request), draft.probabilities[:length].tolist()
            elif len(draft.token_ids):
                self._acceptance_of(request).forgive()
        return [draft.token_ids[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def holds(self, request: Request, num_running: int) -> bool:
        """Return True if drafts behind the token now being sampled are likely enough to wait for it."""
        if not self._control.pays_at_best(num_running, num_running, self._most):
            return False
        if self._text is None:
            chances = self._acceptance_of(request).survival([1.0] * self._most)
        else:
            draft = self._text.propose(request, self._most + 1)
            chances = self._survival(request, draft)[1:]
        (length,) = self._control.choose([chances], num_running, num_running, self._most)
        return sum(chances[:length]) >= _LEAST_FOR_HOLDING

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learn from a committed draft how many of its tokens were right."""
        launched = self._launched.pop(request.id, None)
        if launched is not None:
            acceptance, probabilities = launched
            acceptance.observe(probabilities[:num_drafts], num_accepted)

    def forget_request(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._acceptance.pop(request.id, None)
        self._acceptance_of_forced.pop(request.id, None)
        self._launched.pop(request.id, None)
        if self._text is not None:
            self._text.forget_request(request)

    def _draft(self, request: Request, limit: int) -> Draft:
        proposal = request.proposal
        if proposal is not None:
            token_ids = proposal.token_ids[:limit]
            if proposal.probabilities is not None:
                return Draft(token_ids, proposal.probabilities[:limit])
            return Draft(token_ids, np.ones(len(token_ids), dtype=np.float32))
        return NO_DRAFT if self._text is None else self._text.propose(request, limit)

    def _survival(self, request: Request, draft: Draft) -> list[float]:
        return self._acceptance_of(request).survival(draft.probabilities.tolist())

    def _acceptance_of(self, request: Request) -> Acceptance:
        """Return the acceptance of drafts from the source of the request's next one."""
        if request.proposal is not None and request.proposal.is_forced:
            return self._acceptance_of_forced.setdefault(request.id, Acceptance(_BELIEF_IN_FORCED))
        return self._acceptance.setdefault(request.id, Acceptance())


def text_drafter(config: SpeculativeConfig) -> TextDrafter | None:
    """Return the drafter from text that the config names; None if proposals come with the outcomes of steps."""
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixDrafter(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
    return None


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

    def forget_request(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._texts.pop(request.id, None)
