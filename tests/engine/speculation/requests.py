"""Requests that say what a test wants: they grow, end their turns, and get further input."""

from __future__ import annotations

from tokenmill.core.request import CacheKey, Request, RequestStatus, TurnInput
from tokenmill.core.sampling_params import SamplingParams

MAX_TOKENS = 200_000
# Ends a turn of a session; no other token of a test is it.
STOP = 99


def make_request(name: str, prompt: list[int], *, is_session: bool = False, salt: str = "") -> Request:
    """A running request."""
    request = Request(
        name,
        prompt,
        SamplingParams(max_tokens=MAX_TOKENS),
        arrival=0,
        max_tokens_total=MAX_TOKENS + len(prompt),
        stop_token_ids=frozenset({STOP}),
        is_resumable=is_session,
        cache_key=CacheKey(salt=salt),
    )
    request.move_to(RequestStatus.RUNNING)
    return request


def say(request: Request, token_ids: list[int]) -> None:
    """A step has brought these tokens."""
    request.num_pending_tokens += len(token_ids)
    request.num_computed_tokens = request.num_tokens + len(token_ids) - 1
    request.append_outputs(token_ids)


def next_turn(request: Request, token_ids: list[int]) -> None:
    """End the turn of a session and go on with further input."""
    say(request, [STOP])
    request.extend(TurnInput(token_ids, SamplingParams(max_tokens=MAX_TOKENS), is_last=False, max_model_len=MAX_TOKENS))
    request.move_to(RequestStatus.RUNNING)
