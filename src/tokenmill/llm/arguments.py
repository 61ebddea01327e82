"""Check the arguments of `LLM` and turn prompts into the messages that start requests."""

from __future__ import annotations

import functools
import inspect
import io
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np

from tokenmill.config.configs import EngineConfig
from tokenmill.config.parse import Setting, settings
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.data_url import data_url
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.core.names import refuse_unknown
from tokenmill.core.regular_file import read_regular
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.llm.adapters import LoRARequest
from tokenmill.model.audio.pieces import wav_file
from tokenmill.serving.frontend.chat_messages import normalize_messages

_C = TypeVar("_C", bound=type)


Conversation = list[dict[str, Any]]
Chats = Conversation | Sequence[Conversation]
Prompt = str | list[int] | dict[str, Any]
Prompts = Prompt | Sequence[Prompt]
Priority = int | Sequence[int] | None

# How vLLM, and how transformers, call a part with an image that is there.
_KINDS = ("image_pil", "image")
# Samples and their rate.
_PAIR = 2


class ChatOptions(TypedDict, total=False):
    """Options for turning a conversation into a prompt, with vLLM's names.

    Attributes:
        tools: functions that the template shows to the model, in OpenAI's form.
        chat_template_kwargs: further variables of the template, e.g. `{"enable_thinking": False}`.
        add_generation_prompt: begin the answer; the default, unless the last message is continued.
        continue_final_message: leave the last message open, so that the model goes on with it.
        priority: for all conversations, or one for each.
        lora_request: the adapter of all conversations, or one for each.
    """

    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    priority: Priority
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None


def template_options(options: ChatOptions) -> dict[str, Any]:
    """Return the options that are given, with the further variables of the template."""
    given = {name: value for name, value in options.items() if value is not None}
    variables: Any = given.pop("chat_template_kwargs", {})
    return {**variables, **given}


def checked_names(cls: _C) -> _C:
    """Make the methods of a class raise TypeError for an argument that they do not have; see `refuse_unknown`."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _checked(method))
    return cls


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(method).parameters
    names = parameters.keys() | (ChatOptions.__annotations__.keys() if "options" in parameters else set())

    @functools.wraps(method)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given.keys() - names:
            refuse_unknown("argument", f"LLM.{method.__name__}", (name, given.pop(name)), names - {"self"}, TypeError)
        return method(*args, **given)

    return checked


def engine_config(model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's config from fields by their own or vLLM's names; None stands for the default.

    Raises:
        InvalidConfig: an option does not exist (it names the nearest one that does), or a value is invalid.
    """
    spellings = {
        alias.lstrip("-").replace("-", "_"): setting
        for setting in settings(EngineConfig)
        for alias in (setting.name, *setting.how.aliases)
    }
    given: dict[str, Any] = {"model": str(model) or str(demo_model_path())}
    for name, value in options.items():
        if name not in spellings:
            refuse_unknown("option", "LLM", (name, value), spellings, InvalidConfig)
        elif value is not None:
            given[spellings[name].name] = _option(name, spellings[name], value)
    return EngineConfig(**given).resolve()


def _option(name: str, setting: Setting, value: Any) -> Any:
    """Return the field's value for an option: `"4GiB"` where a number belongs, vLLM's dictionaries for JSON."""
    how = setting.how
    if how.choices and not how.plugins and value not in how.choices:
        raise InvalidConfig(f"LLM: {name} must be one of {', '.join(how.choices)}, got {value!r}")
    if isinstance(value, str) and setting.kind in ("int", "float", "bool"):
        try:
            return setting.read(value)
        except InvalidConfig as error:
            raise InvalidConfig(f"LLM: {name}: {error}") from error
    return json.dumps(value) if isinstance(value, dict) else value


def one_each(name: str, given: Any, count: int) -> list[Any]:
    """Return a list with one value for each prompt, from one value for all or a list.

    Raises:
        InvalidRequest: the number of values differs from the number of prompts.
    """
    each = list(given) if isinstance(given, Sequence) else [given] * count
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts, but {len(each)} {name}", name)
    return each


def split(given: Any, inner: type) -> list[Any]:
    """Return a list of prompts from several or a single one, which is a list of `inner` or not a list.

    Raises:
        InvalidRequest: it is neither.
    """
    if not isinstance(given, str | Mapping | Sequence):
        kind = "None" if given is None else f"a value of type {type(given).__name__}"
        raise InvalidRequest(f"a prompt is a text or a list, or give a list of prompts; this is {kind}", "prompts")
    return [given] if isinstance(given, str | Mapping) or (given and isinstance(given[0], inner)) else list(given)


def prompt_fields(prompt: Any) -> dict[str, Any]:
    """Return the fields of a `GenerateText` for a prompt or a conversation; ids win over the text they came from.

    Raises:
        InvalidRequest: it is not a prompt.
    """
    if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "prompt_token_ids"}:
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        prompt = text if ids is None else ids
    if isinstance(prompt, str):
        return {"text": prompt}
    kinds = {type(part) for part in prompt} if isinstance(prompt, list | tuple) else {None}
    if kinds == {dict}:
        return {"messages": normalize_messages(with_data_urls(list(prompt)))}
    if kinds <= {int}:
        return {"token_ids": list(prompt)}
    forms = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
    raise InvalidRequest(f"a prompt is {forms}; conversations are for chat", "prompt")


def generate_text(
    prompt: Prompt | Conversation,
    params: SamplingParams,
    template: Mapping[str, Any],
    priority: int,
    adapter: AdapterRef | None = None,
) -> GenerateText:
    """Return the message that starts the requests of a prompt.

    Args:
        template: `tools` and the other variables of the chat template.
        adapter: the adapter to run them with; None: the base model.

    Raises:
        InvalidRequest: it is not a prompt, or an argument would have no effect.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"not SamplingParams, but {type(params).__name__}", "sampling_params")
    fields = prompt_fields(prompt)
    if "messages" in fields:
        variables = dict(template)
        fields |= {"tools": variables.pop("tools", None), "template_kwargs": variables}
    elif template:
        raise InvalidRequest(f"{', '.join(template)}: only conversations are rendered by a template", "prompt")
    if not isinstance(priority, int):
        raise InvalidRequest("priority must be an integer", "priority")
    if priority:
        fields["priority"] = priority
    ids = [uuid.uuid4().hex for _ in range(params.n)]
    wants_prompt = params.prompt_logprobs is not None
    return GenerateText(ids=ids, params=params, wants_prompt=wants_prompt, adapter=adapter, **fields)


def with_data_urls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with all images and clips as parts with a URL, and all videos as lists of URLs.

    Takes `{"type": "image", "image": ...}` and `{"type": "image_pil", "image_pil": ...}` with an image of Pillow's or
    the path of a file, `{"type": "video", "video": [...], "fps": 2}` with a list of these, and
    `{"type": "audio", "audio": ...}` with the path of a file of sound, or samples and their rate.

    Raises:
        InvalidRequest: such a part has another content, or the file cannot be read.
    """
    return [
        {**message, "content": [_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "video" and isinstance(part.get("video"), list):
        return {**part, "video": [_url(frame) for frame in part["video"]]}
    if kind == "audio" and "audio" in part:
        return {"type": "audio_url", "audio_url": {"url": _clip_url(part["audio"])}}
    if kind not in _KINDS:
        return part
    return {"type": "image_url", "image_url": {"url": _url(part.get(kind))}}


def _url(image: Any) -> str:
    if isinstance(image, str) and image.startswith("data:"):
        return image
    return data_url(_bytes(image))


def _clip_url(clip: Any) -> str:
    if isinstance(clip, str) and clip.startswith("data:"):
        return clip
    if isinstance(clip, str | Path):
        return data_url(_file(clip, "the sound"))
    samples, rate = clip if isinstance(clip, tuple) and len(clip) == _PAIR else (clip, None)
    mono = np.asarray(samples, dtype=np.float32)
    if not isinstance(rate, int) or mono.ndim != 1:
        raise InvalidRequest("a clip is the path of a file, or a pair: mono samples and their rate", "messages")
    return data_url(wav_file(mono, rate))


def _file(path: str | Path, noun: str) -> bytes:
    try:
        return read_regular(Path(path))
    except OSError as error:
        raise InvalidRequest(f"cannot read {noun} {path}: {error.strerror}", "messages") from error


def _bytes(image: Any) -> bytes:
    if isinstance(image, str | Path):
        return _file(image, "the image")
    if not hasattr(image, "save"):
        raise InvalidRequest(f"an image is Pillow's or the path of a file, not {type(image).__name__}", "messages")
    buffer = io.BytesIO()
    # Without loss; what PNG cannot hold, a CMYK image say, the model would not be shown either.
    (image if image.mode in ("RGB", "RGBA", "L", "LA", "P", "1") else image.convert("RGB")).save(buffer, "PNG")
    return buffer.getvalue()
