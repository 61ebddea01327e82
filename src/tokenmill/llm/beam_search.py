"""Search with beams over an engine that draws one token at a time: each round asks for every beam's likeliest tokens.

A beam is a prompt of its own. The prefix that beams share is in the prefix cache, so a round computes little more than
their last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import MAX_LOGPROBS, SamplingParams
from tokenmill.engine.loop.engine import ModelLimits
from tokenmill.llm.outputs import LogprobsAt, RequestOutput

Generate = Callable[[list[Any], SamplingParams], list[RequestOutput]]


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of `LLM.beam_search`, with vLLM's names.

    Attributes:
        beam_width: number of continuations that are kept and returned.
        max_tokens: the most tokens of a continuation.
        ignore_eos: continue to `max_tokens` in any case.
        temperature: must be 0: beams are not sampled.
        length_penalty: beams are ranked by log probability / tokens ** this; the prompt's tokens count, as in vLLM.
        include_stop_str_in_output: keep the token that ended a continuation as part of it.

    Raises:
        InvalidRequest: a value outside its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_LOGPROBS // 2 or self.max_tokens < 1 or self.temperature != 0.0:
            wanted = f"beam_width from 1 to {MAX_LOGPROBS // 2}, max_tokens of 1 or more, temperature 0"
            raise InvalidRequest(f"beam search takes {wanted}; got {self}")


@dataclass(slots=True)
class BeamSearchSequence:
    """A prompt with one continuation.

    Attributes:
        tokens: the ids of the prompt and of the continuation.
        logprobs: one entry per token of the continuation.
        cum_logprob: the sum over the continuation.
        text: the text of all tokens.
    """

    tokens: list[int]
    logprobs: list[LogprobsAt] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


class BeamSearchOutput(msgspec.Struct, frozen=True):
    """The best continuations of a prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The state of a search for one prompt.

    Attributes:
        beams: sequences that go on.
        ended: sequences that have ended.
    """

    def __init__(self, prompt: list[int], params: BeamSearchParams, limits: ModelLimits) -> None:
        self.beams = [BeamSearchSequence(prompt)]
        self.ended: list[BeamSearchSequence] = []
        self._params = params
        self._eos = frozenset() if params.ignore_eos else limits.eos_token_ids
        self._rounds_left = min(params.max_tokens, limits.max_model_len - len(prompt))

    def advance(self, results: Sequence[RequestOutput]) -> None:
        """Extend each beam by its candidate tokens and keep the best; raise TokenMillError if a beam failed."""
        longer: list[BeamSearchSequence] = []
        for beam, result in zip(self.beams, results, strict=True):
            result.check()
            (at,) = result.outputs[0].logprobs or ({},)
            for token_id, found in at.items():
                tokens, total = [*beam.tokens, token_id], beam.cum_logprob + found.logprob
                candidate = BeamSearchSequence(tokens, [*beam.logprobs, at], total)
                (self.ended if token_id in self._eos else longer).append(candidate)
        self._rounds_left -= 1
        self.beams = self._best(longer)
        if not self._rounds_left:
            self.ended, self.beams = self.ended + self.beams, []

    def output(self, decode: Callable[[list[int]], str]) -> BeamSearchOutput:
        """Return the best sequences with their texts."""
        best = self._best(self.ended)
        for one in best:
            one.finish_reason = FinishReason.LENGTH
            if one.tokens[-1] in self._eos:
                one.finish_reason, one.stop_reason = FinishReason.STOP, one.tokens[-1]
                one.tokens = one.tokens if self._params.include_stop_str_in_output else one.tokens[:-1]
            one.text = decode(one.tokens)
        return BeamSearchOutput(best)

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, one: BeamSearchSequence) -> float:
        return one.cum_logprob / (len(one.tokens) - (one.tokens[-1] in self._eos)) ** self._params.length_penalty


def search_beams(
    prompts: list[Any], params: BeamSearchParams, limits: ModelLimits, generate: Generate
) -> list[BeamSearch]:
    """Search for each prompt, round by round, until no beam goes on."""
    one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2 * params.beam_width)
    found = generate(prompts, one_token)
    searches = [BeamSearch(one.prompt_token_ids, params, limits) for one in found]
    while going := [search for search in searches if search.beams]:
        each = iter(found)
        for search in going:
            search.advance([next(each) for _ in search.beams])
        found = generate([beam.tokens for search in searches for beam in search.beams], one_token)
    return searches
