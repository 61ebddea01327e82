"""Make the body for the prefill server from a client's body: its prompt, one token, and to hold the pages."""

from __future__ import annotations

from typing import Any

PARAMS = "kv_transfer_params"
# vLLM's proxies send all of them.
HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What the prompt does not depend on, and one token has no need for, or has no room for.
_DROPPED = (
    "best_of", "echo", "include_stop_str_in_output", "logprobs", "max_completion_tokens", "min_tokens", "n",
    "prompt_logprobs", "request_id", "response_format", "return_token_ids", "stop", "stop_token_ids", "stream_options",
    "structured_outputs", "top_logprobs",
)  # fmt: skip


def may_split(body: dict[str, Any]) -> bool:
    """Return True if two servers can share a request: it has one prompt and only wants what follows it."""
    prompt = body.get("prompt")
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(part, int) for part in prompt))
    wants_prompt = body.get("echo") or body.get("prompt_logprobs") is not None
    return ("messages" in body or is_one) and not wants_prompt


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body for the server that computes the prompt."""
    kept = {name: value for name, value in body.items() if name not in _DROPPED}
    return kept | {"stream": False, "max_tokens": 1, PARAMS: HOLD}


def decode_body(body: dict[str, Any], params: dict[str, Any] | None) -> dict[str, Any]:
    """Return the body for the server that decodes; `params`: the prefill server's answer; None: it computes alone."""
    kept = {name: value for name, value in body.items() if name != PARAMS}
    return kept if params is None else kept | {PARAMS: params}
