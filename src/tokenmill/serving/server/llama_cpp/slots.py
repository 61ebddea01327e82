"""Show llama.cpp's slots; save the conversation of one to a file with its KV, restore it from there, or erase it."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import EngineDead, InvalidRequest, NotFound
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.fields import Label
from tokenmill.serving.server.http.body import read_body, read_query
from tokenmill.serving.server.http.errors import Forbidden
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import tenant_of

_IDLE = -1  # llama.cpp's task of a slot that has none


class SlotsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of /slots; `fail_on_no_slot=1`: answer 503 while all slots are in use."""

    fail_on_no_slot: bool = False
    model: str | None = None


class ActionQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of /slots/{id_slot}: what to do with the slot's conversation."""

    action: Literal["save", "restore", "erase"]
    model: str | None = None


class SlotBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /slots/{id_slot}: the name of the file to save to or restore from, none to erase."""

    filename: Label | None = None
    model: str | None = None


class SlotRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def show(self, request: Request) -> Response:
        """Show as many slots as requests may run, those of running requests first; a request takes any of them."""
        query = read_query(request, SlotsQuery)
        count, num_running = num_slots(self._context), self._context.engines.stats.num_running
        if query.fail_on_no_slot and num_running >= count:
            raise EngineDead("no slot available")
        n_ctx = self._context.ready.max_model_len
        return json_response(
            [
                {"id": index, "id_task": _IDLE, "n_ctx": n_ctx, "is_processing": index < num_running}
                for index in range(count)
            ]
        )

    async def act(self, request: Request) -> Response:
        """Save, restore or erase the conversation of a slot, in llama.cpp's form.

        Raises:
            Forbidden: the server has several keys, which share slots and files.
        """
        if tenant_of(request.scope):
            raise Forbidden("slots and their files belong to all keys; a server of several keys saves none")
        # llama.cpp's clients send none to erase.
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        body = await read_body(request, SlotBody, self._context.bodies) if has_body else SlotBody()
        query = read_query(request, ActionQuery)
        self._context.check_model(body.model or query.model)
        name = request.path_params["id_slot"]
        if not name.isascii() or not name.isdigit():
            raise NotFound("a slot has a number; see /slots", "id_slot")
        if query.action != "erase" and body.filename is None:
            raise InvalidRequest(f"to {query.action} a slot takes a filename", "filename")
        started = time.perf_counter()
        seen = await self._engine().act_on_slot(int(name), query.action, body.filename or "")
        if seen.error:
            raise InvalidRequest(seen.error)
        milliseconds = round(1e3 * (time.perf_counter() - started), 3)
        answer: dict[str, Any] = {"id_slot": int(name)}
        match query.action:
            case "save":
                answer |= {"filename": body.filename, "n_saved": seen.num_tokens, "n_written": seen.num_bytes}
                answer["timings"] = {"save_ms": milliseconds}
            case "restore":
                answer |= {"filename": body.filename, "n_restored": seen.num_tokens, "n_read": seen.num_bytes}
                answer["timings"] = {"restore_ms": milliseconds}
            case _:
                answer["n_erased"] = seen.num_tokens
        return json_response(answer)

    def _engine(self) -> EngineHandle:
        engines = list(self._context.engines)
        if len(engines) != 1:
            raise InvalidRequest(f"slots belong to one engine, and this server has {len(engines)}")
        return engines[0]


def num_slots(context: ServerContext) -> int:
    """Return the number of requests that all engines together run at a time."""
    counts = [engine.ready.max_num_seqs for engine in context.engines if engine.ready is not None]
    return sum(counts) or context.ready.max_num_seqs
