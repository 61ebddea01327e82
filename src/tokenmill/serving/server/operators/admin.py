"""Serve the routes by which operators inspect and steer a running server."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.core.api_messages import PrefixNote
from tokenmill.core.engine_messages import EngineReady, RequestState
from tokenmill.core.errors import Conflict, EngineDead, InvalidRequest, NotFound
from tokenmill.core.messages import GenerateText
from tokenmill.core.pooling import PoolingParams
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.version import VERSION
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.fields import Label
from tokenmill.serving.server.http.body import read_body, read_query
from tokenmill.serving.server.http.errors import without_folders
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import owner_of

HEALTH_SECONDS = 30.0
MAX_ABORTS = 4096

_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLING_SHOWN = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES)
# Addresses, keys and places on this machine are not shown over HTTP.
_PRIVATE = frozenset(
    {"api_key", "chat_template", "download_dir", "host", "kv_events_config", "model", "ssl_certfile", "ssl_keyfile"}
    | {
        "batch_dir",
        "kv_disk",
        "kv_transfer_config",
        "lora_dir",
        "lora_merge",
        "lora_modules",
        "master_addr",
        "master_secret",
        "otlp_traces_endpoint",
        "replica",
        "responses_dir",
        "slot_save_path",
        "step_log",
        "tokenizer",
        "uds",
    }
    | {"api_key_models", "kv_source", "models", "models_dir", "rendezvous", "weight_cache_dir", "weight_memory"}
)


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The requests to end: by the ids of their replies (or of single continuations), or all."""

    request_ids: list[Label] | None = None
    abort_all: bool | None = None


class Aborted(msgspec.Struct):
    """The reply of /abort_requests; it names ids that are not open, whose requests may have just ended."""

    num_aborted: int
    unknown: list[str]


class ControlBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """llama.cpp's way to say the same as /v1/requests/{id}/answer_now."""

    id: Label
    action: Literal["reasoning_end"]


class PauseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of /pause; `mode` says if open requests end or are kept until /resume."""

    mode: Literal["abort", "keep"] = "abort"
    clear_cache: bool = True


class ResetQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of /reset_prefix_cache, in vLLM's names.

    Attributes:
        reset_running_requests: send running requests back to the queue first; else they prevent the reset.
        reset_external: forget prefixes stored outside of the KV cache too, in memory or on disk.
    """

    reset_running_requests: bool = False
    reset_external: bool = False


class AnsweringNow(msgspec.Struct):
    """The reply of /v1/requests/{id}/answer_now: the requests that were told."""

    request_ids: list[str]


class RequestReport(msgspec.Struct):
    """The reply of /v1/requests/{id}: the state of each continuation of a call.

    `prefix`: the blocks of its prompt that were dropped or moved, and the change that broke its cached prefix, if any.
    `session`: the session whose turn it is, if it is one.
    """

    id: str
    requests: list[RequestState]
    prefix: PrefixNote | msgspec.UnsetType = msgspec.UNSET
    session: str | msgspec.UnsetType = msgspec.UNSET


class AdminRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def abort_requests(self, request: Request) -> Response:
        """End requests; their clients get `finish_reason: abort`."""
        body = await read_body(request, AbortBody, self._context.bodies)
        calls = self._context.calls
        if bool(body.abort_all) == bool(body.request_ids):
            raise InvalidRequest("give either request_ids or abort_all", "request_ids")
        if body.abort_all:
            return json_response(Aborted(await calls.abort_all(), []))
        if len(body.request_ids or ()) > MAX_ABORTS:
            raise InvalidRequest(f"at most {MAX_ABORTS} request_ids at once", "request_ids")
        found = await self._find(body.request_ids or (), owner_of(request.scope))
        ids = {request_id for request_ids in found.values() for request_id in request_ids}
        calls.abort(sorted(ids))
        return json_response(Aborted(len(ids), [name for name, request_ids in found.items() if not request_ids]))

    async def request(self, request: Request) -> Response:
        """Show the state of a call's requests, and why they wait."""
        name, owner = request.path_params["id"], owner_of(request.scope)
        ids = (await self._find([name], owner))[name]
        found = self._context.sessions.with_turn(owner, name)
        session = msgspec.UNSET if found is None else found[0].id
        if not ids and found is not None:
            waits = "it waits for an earlier turn of its session"
            return json_response(RequestReport(name, [_on_its_way(name, waits)], session=session))
        if not ids:
            raise NotFound("no open request has this id", "id")
        states = {state.id: state for state in await self._context.engines.explain(ids)}
        notes = await self._context.calls.notes(ids, owner)
        prefix = next((notes[one] for one in ids if one in notes), msgspec.UNSET)
        return json_response(RequestReport(name, [states.get(one) or _on_its_way(one) for one in ids], prefix, session))

    async def answer_now(self, request: Request) -> Response:
        """Let a call end its thinking and answer."""
        return json_response(AnsweringNow(await self._end_thinking(request.path_params["id"], request)))

    async def control(self, request: Request) -> Response:
        """Let a call end its thinking, in llama.cpp's form."""
        body = await read_body(request, ControlBody, self._context.bodies)
        await self._end_thinking(body.id, request)
        return json_response({"success": True})

    async def _end_thinking(self, name: str, request: Request) -> list[str]:
        if not self._context.parsers.reasoning:
            raise Conflict("this server does not know how the model marks its thinking: --reasoning-parser")
        ids = (await self._find([name], owner_of(request.scope)))[name]
        if not ids:
            raise NotFound("no open request has this id", "id")
        self._context.calls.answer_now(ids)
        return ids

    async def pause(self, request: Request) -> Response:
        """Stop the engines between two steps; new requests wait until /resume."""
        query = read_query(request, PauseQuery)
        if query.mode == "abort":
            await self._context.calls.abort_all()
        await self._context.engines.set_paused(True)
        if query.clear_cache and query.mode == "abort":
            await self._context.engines.reset_prefix_cache(True)
        return json_response({"status": "paused"})

    async def resume(self, _request: Request) -> Response:
        """Let the engines go on."""
        await self._context.engines.set_paused(False)
        return json_response({"status": "running"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget all cached prefixes."""
        query = read_query(request, ResetQuery)
        if not await self._context.engines.reset_prefix_cache(query.reset_running_requests, query.reset_external):
            raise Conflict("requests are running; reset_running_requests=true sends them back to the queue first")
        return json_response({"status": "reset"})

    async def sleep(self, _request: Request) -> Response:
        """Give the memory of KV back to the machine; the next request takes it again."""
        if not await self._context.engines.sleep():
            raise Conflict(
                "the engine cannot sleep: requests or sessions are open, or its KV is a GPU's, of several ranks, in a "
                "step log or another engine's to read"
            )
        return json_response({"status": "asleep"})

    async def server_info(self, _request: Request) -> Response:
        """Show the flags and what each engine reported when it became ready."""
        engines = [
            {"num_ranks": len(engine.health), "trouble": engine.trouble} | self._described(engine.ready)
            for engine in self._context.engines
            if engine.ready is not None
        ]
        ready = self._context.engines.ready or self._context.ready
        info: dict[str, Any] = {
            "engine": self._described(ready),
            "engines": engines,
            "settings": self._context.settings,
            "default_sampling": _sampling_shown(self._context.default_sampling),
        }
        # As SGLang's clients look for them.
        sizes: dict[str, Any] = {"max_total_num_tokens": ready.num_pages * ready.page_size}
        info |= sizes | {"internal_states": [{} for _ in engines]}
        return json_response({"version": VERSION} | info)

    async def load(self, _request: Request) -> Response:
        """Show the load of the server."""
        stats = self._context.engines.stats
        return json_response(
            {
                "server_load": self._context.calls.num_open,
                "num_requests_running": stats.num_running,
                "num_requests_waiting": stats.num_waiting,
                "kv_cache_usage_perc": stats.num_pages_pinned / max(1, stats.num_pages),
            }
        )

    async def health_generate(self, _request: Request) -> Response:
        """Return 200 once each engine has made a token through each text worker, else 503 within half a minute."""
        trouble = self._context.trouble()
        if trouble is not None:
            raise EngineDead(trouble)
        ways = itertools.product(self._context.engines, range(self._context.client.num_workers))
        for outcome in await asyncio.gather(*itertools.starmap(self._make_token, ways), return_exceptions=True):
            if outcome is not None:
                raise outcome
        return Response(status_code=200)

    async def _make_token(self, engine: EngineHandle, worker: int) -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prompt = GenerateText(ids=[], params=params, token_ids=[0], engine=engine.index)
        if engine.ready is not None and engine.ready.pooling is not None:
            prompt = msgspec.structs.replace(prompt, pooling=PoolingParams(), needs_no_output=True)
        try:
            async with (
                asyncio.timeout(HEALTH_SECONDS),
                self._context.client.generate([prompt], worker=worker) as generation,
            ):
                async for _, output in generation:
                    if output.error is not None:
                        raise EngineDead(output.error)
        except TimeoutError as error:
            raise EngineDead(
                f"no token of {engine.name} has come through text worker {worker} for {HEALTH_SECONDS:g} seconds"
            ) from error

    def _described(self, ready: EngineReady) -> dict[str, Any]:
        adapters = [adapter.name for adapter in ready.adapters]
        return msgspec.structs.asdict(ready) | {"model": self._context.model_name, "adapters": adapters}

    async def _find(self, names: Sequence[str], owner: str) -> dict[str, list[str]]:
        """Return, for each name, the open requests of the owner's call of this name; empty if it is over.

        Raises:
            Conflict: several calls have this name, which their clients chose.
        """
        found = await self._context.calls.find(names, owner)
        for calls in found.values():
            if len(calls) > 1:
                raise Conflict(f"{len(calls)} open calls have this id: use the ids of their requests")
        return {name: calls[0] if calls else [] for name, calls in found.items()}


def public_settings(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """Return the flags that /server_info shows."""
    fields = dataclasses.asdict(engine) | dataclasses.asdict(server)
    return {name: _shown(value) for name, value in fields.items() if name not in _PRIVATE}


def _shown(value: Any) -> Any:
    """Return a flag's value without folders, which JSON in it may name."""
    return without_folders(value) if isinstance(value, str) else value


def _sampling_shown(defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the default sampling parameters of requests."""
    params = SamplingParams(**defaults)
    return {name: getattr(params, name) for name in _SAMPLING_SHOWN}


def _on_its_way(request_id: str, wait_reason: str = "its prompt is being encoded") -> RequestState:
    """Return the state of a request that the engine does not have: it is being encoded, or has just ended."""
    return RequestState(
        id=request_id,
        status="waiting",
        wait_reason=wait_reason,
        priority=0,
        num_prompt_tokens=0,
        num_output_tokens=0,
        num_computed_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
    )
