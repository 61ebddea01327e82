"""Answer operators' requests to a running engine, each at once, between two steps."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenmill.core.engine_messages import AdapterSeen, Done, EngineReply, RequestState, RequestStates, SlotSeen
from tokenmill.core.live import ShowTurns
from tokenmill.core.messages import (
    ActOnSlot,
    AddRequest,
    EngineControl,
    ExplainRequests,
    LookAtAdapter,
    ResetPrefixCache,
    SetPaused,
    Sleep,
    TokenOutput,
)
from tokenmill.core.request import Request
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.loop.live_report import live_report


def answer(engine: Engine, message: EngineControl, publish: Callable[[list[TokenOutput]], None]) -> EngineReply:
    """Carry out an operator's message and return the reply.

    Args:
        publish: takes the outputs of steps that had been launched before and are finished first.
    """
    match message:
        case SetPaused():
            _drain(engine, publish)
            if message.is_paused != engine.is_paused:
                engine.set_paused(message.is_paused)
            return Done(message.id, True)
        case ResetPrefixCache():
            _drain(engine, publish)
            return Done(message.id, engine.reset_prefix_cache(message.preempt_running, message.reset_external))
        case Sleep():
            _drain(engine, publish)
            return Done(message.id, engine.sleep())
        case LookAtAdapter() | ActOnSlot():
            return engine.answer(message) or _refusal(message)
        case ExplainRequests():
            alive = engine.scheduler.requests
            requests = [alive[request_id] for request_id in message.request_ids if request_id in alive]
            return RequestStates(message.id, [_state(engine, request) for request in requests])
        case ShowTurns():
            return live_report(message, engine.iterations(), engine.scheduler, engine.lifetimes)


def _refusal(message: LookAtAdapter | ActOnSlot) -> EngineReply:
    if isinstance(message, ActOnSlot):
        return SlotSeen(message.id, error="conversations are saved by a server started with --slot-save-path")
    return AdapterSeen(message.id, None, "adapters need a server started with --enable-lora")


def go_on(engine: Engine, request: AddRequest, publish: Callable[[list[TokenOutput]], None]) -> list[TokenOutput]:
    """Begin a request again behind its output, under the parameters that come now; do nothing if it has ended.

    `publish`: see `answer`.
    """
    _drain(engine, publish)
    former = engine.scheduler.requests.get(request.id)
    if former is None:
        return []
    output = former.token_ids[former.num_prompt_tokens :].tolist()
    engine.abort([request.id])  # its client is told nothing: it goes on
    return engine.add(msgspec.structs.replace(request, output_token_ids=output))


def _drain(engine: Engine, publish: Callable[[list[TokenOutput]], None]) -> None:
    """Finish the launched steps without launching others."""
    was_paused = engine.is_paused
    if engine.scheduler.in_flight:
        engine.set_paused(True)
        while engine.scheduler.in_flight:
            publish(engine.step())
        engine.set_paused(was_paused)


def _state(engine: Engine, request: Request) -> RequestState:
    return RequestState(
        id=request.id,
        status=request.status.value,
        wait_reason="the engine is paused" if engine.is_paused else engine.scheduler.explain(request.id),
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_external_cached_tokens=request.num_external_cached_tokens,
        num_preemptions=request.num_preemptions,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
        adapter=request.adapter_name or None,
    )
