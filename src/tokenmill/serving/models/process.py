"""Run the process of a server of several models: HTTP in front of their servers, until it is told to stop."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.sizes import size_text
from tokenmill.ipc.log_lines import LineHandler
from tokenmill.serving.models.app import build_models_app
from tokenmill.serving.models.batch_lines import ModelLines
from tokenmill.serving.models.catalogue import Catalogue
from tokenmill.serving.models.listing import Listing
from tokenmill.serving.models.model_server import RESPONSES
from tokenmill.serving.models.reply import Answers
from tokenmill.serving.models.routes import Shared
from tokenmill.serving.models.service import ModelService
from tokenmill.serving.observe.event_log import EventLog
from tokenmill.serving.proxy.relay import OpenReplies
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.descriptors import raise_limit
from tokenmill.serving.server.http.listener import bind, check_tls, is_on_loopback, url
from tokenmill.serving.server.http.middleware import owner_of_key
from tokenmill.serving.server.http.server import HttpServer, wind_up
from tokenmill.serving.server.http.unknown_fields import UnknownFields
from tokenmill.serving.server.openai.stored_responses import StoredResponsesRoutes
from tokenmill.serving.server.process.parent import private_folder
from tokenmill.serving.server.process.screen import StandardError
from tokenmill.serving.server.process.served_batches import ServedBatches
from tokenmill.serving.server.response_files import ResponseFiles
from tokenmill.serving.server.response_store import ResponseStore

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def serve(
    config: ServerConfig,
    read: Callable[[int], Catalogue],
    budget: int,
    available: Callable[[], int],
    key_models: Mapping[str, frozenset[str]],
    num_slots: int,
) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0, or 1 if the server ends by itself.

    Args:
        read: returns the models, given the bytes that they may take together.
        available: returns the bytes of memory that are left.
        key_models: API keys that may use some models only, with the names of these.
        num_slots: most lines of batches that run at the same time.

    Raises:
        InvalidConfig: the address cannot be taken, or models and presets do not go together.
    """
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    write = StandardError().on_line
    logging.getLogger().addHandler(LineHandler(write=write))
    log = EventLog(write, config.log_format == "json")
    check_tls(config)
    raise_limit()
    adopt_orphans()
    with bind(config) as listener, private_folder() as folder:
        try:

            def checked() -> Catalogue:
                catalogue = read(budget)
                _check(catalogue, budget)
                return catalogue

            limits = (budget, config.models_ttl, config.models_wait)
            service = ModelService(checked, folder, limits, available, log.note)
            owners = {owner_of_key(key): names for key, names in key_models.items()}
            responses = ResponseFiles(Path(config.responses_dir) if config.responses_dir else folder / RESPONSES)
            return asyncio.run(_serve(service, config, listener, log, owners, num_slots, responses))
        finally:
            if config.uds is not None:
                Path(config.uds).unlink(missing_ok=True)


def _check(catalogue: Catalogue, budget: int) -> None:
    """Refuse pinned models that do not fit together.

    Raises:
        InvalidConfig: with the numbers.
    """
    pinned = [entry for entry in catalogue if entry.preset.pinned]
    needed = sum(entry.description.memory.total for entry in pinned)
    if needed > budget:
        raise InvalidConfig(
            f"the pinned models {', '.join(entry.name for entry in pinned)} need {size_text(needed)}, and all models "
            f"may take {size_text(budget)} (--models-memory): pin fewer, or make them smaller"
        )
    groups = [entry.preset.group for entry in pinned if entry.preset.group is not None]
    if len(groups) > len(set(groups)):
        raise InvalidConfig("two pinned models are of one group, of which only one is loaded at a time")


async def _serve(
    service: ModelService,
    config: ServerConfig,
    listener: socket.socket,
    log: EventLog,
    key_models: Mapping[str, frozenset[str]],
    num_slots: int,
    responses: ResponseFiles,
) -> int:
    replies, lines = OpenReplies(), ModelLines(service, key_models)
    batches = None if config.batch_dir is None else ServedBatches(config, lambda: lines.is_busy)
    bodies = BodyBudget(config.max_body_bytes_in_flight, UnknownFields(config.strict_fields))
    stored = StoredResponsesRoutes(ResponseStore(responses))
    kept = () if batches is None else (batches.service, batches.collector)
    shared = Shared(service, Answers(service, replies), Listing(service), bodies, key_models, stored, *kept)
    app = build_models_app(shared, config, is_on_loopback(listener))
    http = HttpServer(app, config, listener, lambda line: log.note("connections", line))
    is_asked = asyncio.Event()

    def ask() -> None:
        if is_asked.is_set():  # the second Ctrl-C: do not wait for streams
            replies.end()
        is_asked.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
    serving, asked = await http.start(), asyncio.ensure_future(is_asked.wait())
    log.note(
        "ready", f"{len(service.catalogue)} models at {url(config, listener)}, in {size_text(service.keeper.budget)}"
    )
    service.start()
    if batches is not None:
        batches.start(lines.of(batches.service.owner), num_slots)
    try:
        await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return 1
        service.end_waits()
        if batches is not None:
            await batches.stop()
        await wind_up([(http, serving)], list, config.shutdown_timeout, replies.end)
        return 0
    finally:
        asked.cancel()
        if batches is not None:
            await batches.close()
        await service.close()


def adopt_orphans() -> None:
    """Let processes that a model's server leaves behind become children of this one, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
