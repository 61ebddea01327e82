"""Shorten the conversation of a response that asks for it, `truncation: "auto"`, by whole turns, the oldest first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest, PromptTooLong
from tokenmill.core.messages import GenerateText
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.generation.tokens import num_prompt_tokens

# Of the context, for the answer to a conversation that was shortened, unless the call asks for less.
_ROOM = 1 / 8

_logger = logging.getLogger(__name__)


async def shortened(
    call: GenerationCall, prompts: list[GenerateText], context: ServerContext, num_bytes: int
) -> tuple[GenerationCall, list[GenerateText], int]:
    """Return a call that fits, its prompts, and how many of its oldest turns were dropped.

    The system text and the last turn stay. Where these alone do not fit, nothing is dropped, and the call is refused
    as any that is too long. `num_bytes`: of the body; a long one is read off the event loop.

    Raises:
        InvalidRequest: the chat cannot be encoded.
    """
    most, asked = context.ready.max_model_len, call.params.get("max_tokens")
    if await _fits(prompts[0], most - 1, context):
        return call, prompts, 0
    room = most - max(1, min(asked or most, int(most * _ROOM)))
    system, turns = split_turns(call.messages or [])
    too_few, dropped, fitting = 0, len(turns) - 1, None
    while too_few < dropped:
        # All but the last turn are tried first: if these are not enough, nothing is.
        count = dropped if fitting is None else (too_few + dropped) // 2
        if count == too_few:
            break
        left = [*system, *(message for turn in turns[count:] for message in turn)]
        shorter = msgspec.structs.replace(call, messages=left)
        made = await context.bodies.threads.run(num_bytes, partial(messages_of, shorter, context))
        if await _fits(made[0], room, context):
            dropped, fitting = count, (shorter, made, count)
        elif fitting is None:
            break
        else:
            too_few = count
    if fitting is None:
        return call, prompts, 0
    _logger.info("truncation auto: dropped the oldest %d of %d turns", fitting[2], len(turns))
    return fitting


def split_turns(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Return the system messages at the beginning, and the turns: each begins where the user speaks."""
    start = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns: list[list[dict[str, Any]]] = []
    for message in messages[start:]:
        if message["role"] == "user" and (not turns or turns[-1][-1]["role"] != "user"):
            turns.append([])
        if not turns:
            turns.append([])
        turns[-1].append(message)
    return list(messages[:start]), turns


async def _fits(prompt: GenerateText, most: int, context: ServerContext) -> bool:
    try:
        return await num_prompt_tokens(prompt, context) <= most
    except InvalidRequest as error:
        if error.code != PromptTooLong.code:
            raise
        return False
