"""Answer what llama.cpp's and LM Studio's clients ask about a server: its properties, models and template."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.text_queries import EncodeText
from tokenmill.core.version import VERSION
from tokenmill.serving.frontend.chat_messages import check_depth, normalize_messages
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import template_kwargs
from tokenmill.serving.server.generation.fields import Tools, sampling_params
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.llama_cpp.slots import num_slots
from tokenmill.serving.server.llama_cpp.writer import settings


class TemplateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /apply-template: a chat."""

    messages: list[dict[str, Any]]
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None


class DescriptionRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def props(self, _request: Request) -> Response:
        """Show the server's properties, in llama.cpp's form."""
        context, ready = self._context, self._context.ready
        info = context.tokenizer_info()
        return json_response(
            {
                "default_generation_settings": {
                    "params": settings(sampling_params({}, context.default_sampling)),
                    "n_ctx": ready.max_model_len,
                },
                "total_slots": num_slots(context),
                "model_alias": context.model_name,
                "model_path": context.model_name,  # paths are nobody's business
                "modalities": {"vision": ready.takes_images, "audio": bool(ready.max_clip_seconds)},
                "chat_template": str(info.get("chat_template") or ""),
                "chat_template_caps": self._template_capabilities(),
                "bos_token": str(info.get("bos_token") or ""),
                "eos_token": str(info.get("eos_token") or ""),
                "build_info": f"tokenmill {VERSION}",
                "is_sleeping": False,
            }
        )

    async def apply_template(self, request: Request) -> Response:
        """Show the prompt that a chat becomes."""
        message = await read_as(request, TemplateBody, self._context.bodies, self._read_chat)
        return json_response({"prompt": (await self._context.client.encode(message)).text})

    def _read_chat(self, body: TemplateBody) -> EncodeText:
        self._context.check_model(body.model)
        self._context.check_count(body.messages)
        check_depth(body.tools, "tools")
        kwargs = template_kwargs(
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        messages, kwargs = normalize_messages(body.messages), self._context.parsers.template_kwargs(kwargs)
        return EncodeText(id="", messages=messages, tools=body.tools, template_kwargs=kwargs, wants="text")

    async def models(self, _request: Request) -> Response:
        """List the model and its adapters, in llama.cpp's form, which has OpenAI's fields too."""
        ready = self._context.ready
        takes = {"text": True, "image": ready.takes_images, "audio": bool(ready.max_clip_seconds)}
        modalities = [name for name, is_taken in takes.items() if is_taken]
        entry = {
            "object": "model",
            "created": self._context.started,
            "owned_by": "tokenmill",
            "architecture": {"input_modalities": modalities, "output_modalities": ["text"]},
            "status": {"value": "loaded"},
            "meta": {
                "n_vocab": ready.vocab_size,
                "n_ctx": ready.max_model_len,
                "n_params": ready.num_parameters,
                "size": ready.weight_bytes,
            },
        }
        return json_response({"object": "list", "data": [{"id": name} | entry for name in self._names]})

    async def studio_models(self, _request: Request) -> Response:
        """List the model and its adapters, in LM Studio's form."""
        return json_response({"object": "list", "data": [self._studio_entry(name) for name in self._names]})

    async def studio_model(self, request: Request) -> Response:
        """Show one model, in LM Studio's form."""
        name = request.path_params["model"]
        self._context.check_model(name)
        return json_response(self._studio_entry(name))

    @property
    def _names(self) -> list[str]:
        return [*self._context.names, *(adapter.name for adapter in self._context.adapters)]

    def _template_capabilities(self) -> dict[str, bool]:
        parsers = self._context.parsers
        calls = bool(parsers.notation)
        return {
            "supports_tools": calls,
            "supports_tool_calls": calls,
            "supports_parallel_tool_calls": calls,
            "supports_thinking": bool(parsers.reasoning),
        }

    def _studio_entry(self, name: str) -> dict[str, Any]:
        ready = self._context.ready
        owner, slash, _ = name.partition("/")
        return {
            "id": name,
            "object": "model",
            "type": "vlm" if ready.takes_images else "llm",
            "publisher": owner if slash else "",
            "arch": ready.stored.family or ready.architecture.lower(),
            "compatibility_type": ready.stored.format,
            "quantization": ready.stored.quantization or ready.dtype,
            "state": "loaded",
            "max_context_length": ready.max_model_len,
            "loaded_context_length": ready.max_model_len,
        }
