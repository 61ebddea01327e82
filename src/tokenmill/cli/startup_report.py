"""Write the summary of the start-up screen once the engine is ready: labels and texts, and a command to paste."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.config.configs import ServerConfig
from tokenmill.config.server_settings import DEFAULT_PORT
from tokenmill.core.engine_messages import EngineReady
from tokenmill.ipc.python_child import python_command

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def facts(ready: EngineReady, server: ServerConfig, chat: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Return label and text of each line of the summary; `chat`: the lines about how chat answers are parsed."""
    url = base_url(server)
    num_engines, policy = server.data_parallel_size, server.routing_policy
    lines = [
        ("model", model_name(ready, server)),
        ("from", ready.model),
        ("architecture", f"{ready.architecture}, {count_text(ready.num_parameters)} parameters"),
        ("weights", f"{bytes_text(ready.weight_bytes)} of {ready.dtype} on {ready.device}, {ready.weights_source}"),
        ("kernels", f"{ready.kernels} ({ready.kernels_reason})"),
        ("attention", f"{ready.attention_backend} ({ready.attention_reason})"),
        *_kv_lines(ready),
        *([("states", _states(ready))] if ready.num_states else []),
        ("a step", f"up to {ready.max_num_seqs:,} requests and {ready.max_num_batched_tokens:,} tokens"),
        *([("speculation", ready.speculation)] if ready.speculation else []),
        *([("adapters", _adapters(ready))] if ready.max_loras else []),
        *chat,
        ("threads", f"{ready.num_threads} ({ready.threads_reason})"),
        *([("engines", f"{num_engines}, each as above; requests go by {policy}")] if num_engines > 1 else []),
        ("page", f"{url}/"),
        ("API", f"{url}/v1"),
        ("reference", f"{url}/docs"),
    ]
    if server.api_key:
        how = "open to all" if server.metrics_open else "needs the key; --metrics-open lets scrapers in without"
        lines.append(("metrics", f"{url}/metrics {how}"))
    warning = open_to_all(server)
    return lines if warning is None else [*lines, ("open to all", warning)]


def _kv_lines(ready: EngineReady) -> list[tuple[str, str]]:
    if not ready.num_pages:
        return [("KV cache", f"none, texts are whole in a step: {bytes_text(ready.kv_bytes)} for one layer's")]
    capacity = ready.num_pages * ready.page_size
    room = f"room for {_amount(capacity / ready.max_model_len)} of the full {ready.max_model_len:,} tokens"
    pages = f"{capacity:,} tokens in {ready.num_pages:,} pages, {bytes_text(ready.kv_bytes)}"
    return [("KV cache", pages), *([("", ready.kv_windows)] if ready.kv_windows else []), ("", room)]


def _states(ready: EngineReady) -> str:
    size = bytes_text(ready.state_bytes / ready.num_states)
    return f"{ready.num_states:,} of {size}, of requests and of prefixes, {bytes_text(ready.state_bytes)}"


def _adapters(ready: EngineReady) -> str:
    names = ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in ready.adapters) or "none yet"
    return f"{names}; up to {ready.max_loras} in a step"


def open_to_all(server: ServerConfig) -> str | None:
    """Return a warning if anyone who reaches this machine may use the server."""
    if server.api_key or server.uds is not None or server.host in LOOPBACK:
        return None
    return f"anyone who reaches {server.host} may use it: set --api-key to require a key"


def model_name(ready: EngineReady, server: ServerConfig) -> str:
    """Return the model's id in the API."""
    return server.served_model_name[0] if server.served_model_name else ready.model


def base_url(server: ServerConfig) -> str:
    """Return the server's URL for a client on this machine; for a unix socket any host works."""
    if server.uds is not None:
        return f"http://localhost{server.root_path}"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    scheme = "https" if server.ssl_certfile is not None else "http"
    return f"{scheme}://{host}:{server.port}{server.root_path}"


def curl_command(model: str, server: ServerConfig, generates: bool = True) -> str:
    """Return a command that streams an answer, or asks for a vector of a model that gives nothing else.

    It names the variable of a key, never the value.
    """
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    if not generates:
        body = {"model": model, "input": "Hello!"}
    route = "chat/completions" if generates else "embeddings"
    words = ["curl", "-N", f"{base_url(server)}/v1/{route}", "-H", "Content-Type: application/json"]
    if server.uds is not None:
        words[1:1] = ["--unix-socket", server.uds]
    if server.ssl_certfile is not None:
        words.append("-k")
    command = shlex.join([*words, "-d", json.dumps(body)])
    if server.api_key:
        # Double quotes, so that the shell that it is pasted into puts the key in.
        command += ' -H "Authorization: Bearer $TOKENMILL_API_KEY"'
    return command


def own_command() -> str:
    """Return the command that calls us from any terminal: the whole path if our environment must be activated."""
    if sys.prefix == sys.base_prefix:
        return "tokenmill"
    script = Path(sys.prefix, "bin", "tokenmill")
    return shlex.join([str(script)] if script.exists() else python_command(["-m", "tokenmill"]))


def chat_command(server: ServerConfig) -> str:
    """Return the `tokenmill chat` command that reaches the server."""
    url = base_url(server) if server.uds is None else f"unix:{server.uds}"
    words = [] if url == f"http://127.0.0.1:{DEFAULT_PORT}" else ["--url", url]
    if server.ssl_certfile is not None:
        words += ["--cacert", server.ssl_certfile]
    return f"{own_command()} {shlex.join(['chat', *words])}"


def _amount(requests: float) -> str:
    """Format `1 request`, `1.5 requests`, `256 requests`; rounded down, since it is a promise."""
    whole, tenths = divmod(int(requests * 10), 10)
    if (whole, tenths) == (1, 0):
        return "1 request"
    return f"{whole:,}.{tenths} requests" if tenths else f"{whole:,} requests"


def count_text(count: int) -> str:
    """Format `596 M`, `1.72 B`: three digits."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def bytes_text(size: float) -> str:
    """Format `1.21 GiB`: three digits, powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} GiB" if size < 1000 else f"{size:,.0f} GiB"
