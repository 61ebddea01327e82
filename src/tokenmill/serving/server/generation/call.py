"""Turn calls of any API into messages to the text workers; each API turns its own bodies into calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.infill import Infill
from tokenmill.core.messages import GenerateText
from tokenmill.serving.frontend.admission_control import estimated_tokens
from tokenmill.serving.frontend.chat_messages import check_depth, check_template_kwargs, normalize_messages
from tokenmill.serving.frontend.volatile_blocks import settle
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.fields import sampling_params
from tokenmill.serving.server.generation.tools import NamedTool, call_rules

Prompt = str | list[int] | Infill

MAX_PROMPTS = 256
MAX_CHOICES = 1024
MAX_TRANSFER_BYTES = 64 << 10


class GenerationCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of any API; None stands for a field that its body does not have.

    Attributes:
        params: sampling parameters that the client gave, by the names that `SamplingParams` has for them.
        prompts: texts or token ids to continue, or gaps to fill.
        messages: a chat to answer, in OpenAI's form, instead of prompts.
        template_kwargs: what the chat template gets besides the messages.
        tools: functions in OpenAI's form.
        default_max_tokens: the limit where neither the client nor the model gives one.
        logprobs_field: what the client calls `params["logprobs"]`.
        add_special_tokens: put the tokenizer's special tokens around the prompt; None: around texts, not around chats.
        wants_prompt: the reply describes the prompt's tokens.
        is_score: the reply is about the prompt only: one token is sampled and left out of the reply.
        timeout: seconds after which the call is given up.
        wants_progress, wants_timings: a stream says how far its prompt is computed, and how long all took.
        kv_transfer_params: parameters from the client for the sources of KV.
        model: the name of its model, which may be an adapter.
        conversation: the client's own name for what its prompts go on with, or for its user.
        session_key: calls of one key go to one engine, unless a header names another session; "": no key.
        is_transcript: it asks for the words of sound, which is all that some models give.
    """

    params: dict[str, Any]
    prompts: Sequence[Prompt] = ()
    messages: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    default_max_tokens: int | None = None
    logprobs_field: str = "logprobs"
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    wants_prompt: bool = False
    is_score: bool = False
    stream: bool | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    timeout: float | None = None
    wants_progress: bool = False
    wants_timings: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    model: str | None = None
    conversation: str | None = None
    session_key: str = ""
    is_transcript: bool = False


def messages_of(call: GenerationCall, context: ServerContext) -> list[GenerateText]:
    """Return the messages that ask a text worker for a call, one for each prompt.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    context.check_generates(is_transcript=call.is_transcript)
    context.check_count(call.messages)
    for name, logprobs_field in (("logprobs", call.logprobs_field), ("prompt_logprobs", "prompt_logprobs")):
        _check_logprobs(call.params.get(name), logprobs_field, context.max_logprobs)
    rules = call_rules(call.tools, call.tool_choice, call.parallel_tool_calls is not False, context.parsers)
    defaults = context.default_sampling
    if call.default_max_tokens is not None:
        defaults = {"max_tokens": call.default_max_tokens} | defaults
    if context.parsers.budget is not None and "reasoning_effort" not in call.template_kwargs:
        defaults = {"thinking_token_budget": context.parsers.budget} | defaults
    message = GenerateText(
        ids=[],
        params=sampling_params(call.params, defaults),
        priority=context.check_priority(call.priority),
        cache_salt=call.cache_salt or "",
        truncate_prompt_tokens=_checked_truncation(call.truncate_prompt_tokens),
        wants_prompt=call.wants_prompt,
        wants_progress=call.wants_progress and bool(call.stream),
        needs_no_output=call.is_score,
        add_special_tokens=call.add_special_tokens,
        kv_transfer_params=_checked_transfer(call, context),
        adapter=context.adapters.find(call.model),
        deadline=deadline_of(call.timeout),
    )
    if call.messages is None:
        whole = [msgspec.structs.replace(message, **_prompt_field(one)) for one in _checked(call.prompts, message)]
    else:
        messages, volatile = settle(call.messages) if context.settles_prompts else (call.messages, [])
        chat = msgspec.structs.replace(
            message,
            messages=normalize_messages(messages),
            volatile=volatile,
            tools=None if rules is None else call.tools,
            calls=rules,
            reasoning=context.parsers.reasoning,
            end_of_thinking=context.parsers.end_of_thinking,
            template_kwargs=context.parsers.template_kwargs(call.template_kwargs),
            forced_text=context.script.answer(call.messages, call.tools),
        )
        whole = [chat]
    return [msgspec.structs.replace(one, num_estimated=estimated_tokens(one)) for one in whole]


def deadline_of(timeout: float | None) -> float:
    """Return when a call is given up that begins now, in seconds of the machine's monotonic clock; 0: never."""
    return 0.0 if timeout is None else time.perf_counter() + timeout


def split_prompts(
    prompt: str | Sequence[str | int | list[int]], param: str, most: int = MAX_PROMPTS
) -> list[str | list[int]]:
    """Return the prompts of a field: a string, token ids, or a list of either.

    Raises:
        InvalidRequest: naming `param`.
    """
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if token_ids and len(token_ids) == len(prompt):
        return [token_ids]
    if token_ids or not prompt:
        raise InvalidRequest(f"{param} must be a string, a list of token ids, or a list of those, not empty", param)
    if len(prompt) > most:
        raise InvalidRequest(f"{len(prompt)} prompts in one request; at most {most}", param)
    return [item for item in prompt if not isinstance(item, int)]


def template_kwargs(given: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    """Return the variables of the chat template: the client's own, and those of `fields` that are not None.

    Raises:
        InvalidRequest: there are more variables than any template uses.
    """
    check_template_kwargs(given or {})
    return (given or {}) | {name: value for name, value in fields.items() if value is not None}


def _prompt_field(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, Infill):
        return {"infill": prompt}
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}


def _checked(prompts: Sequence[Prompt], message: GenerateText) -> Sequence[Prompt]:
    n = message.params.n
    if n > 1 and len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts with n={n} exceed {MAX_CHOICES} choices", "n")
    return prompts


def _check_logprobs(num_logprobs: int | None, name: str, most: int) -> None:
    if num_logprobs is not None and not 0 <= num_logprobs <= most:
        raise InvalidRequest(f"{name} must be between 0 and {most}, got {num_logprobs}", name)


def _checked_truncation(count: int | None) -> int | None:
    if count == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more", "truncate_prompt_tokens")
    return count


def _checked_transfer(call: GenerationCall, context: ServerContext) -> dict[str, Any] | None:
    """Return the parameters for the sources of KV if they are within bounds; the sources check what they mean."""
    name, params = "kv_transfer_params", call.kv_transfer_params
    if params is None:
        return None
    if not context.ready.takes_transfer_params:
        raise InvalidRequest(f"{name} needs a server started with --kv-transfer-config", name)
    if len(call.prompts) > 1:
        raise InvalidRequest(f"{name} are of one prompt; there are {len(call.prompts)}", name)
    check_depth(params, name)
    try:
        size = len(msgspec.msgpack.encode(params))
    except OverflowError:
        raise InvalidRequest(f"{name}: a number exceeds 64 bits", name) from None
    if size > MAX_TRANSFER_BYTES:
        raise InvalidRequest(f"{name} take {size} bytes; at most {MAX_TRANSFER_BYTES}", name)
    return params
